"""The log of the patch: warnings of every rank, news of the first one."""

from __future__ import annotations

import logging
import os

import torch

from megatron_patch.application import Application

logger = logging.getLogger("megatron_patch")


def say(message: str, *arguments: object) -> None:
    """Log `message` at the level that a training run shows, on the first rank only."""
    if _rank() == 0:
        logger.warning(message, *arguments)


def announce(message: str, application: Application) -> None:
    """Log `message` once in this application of the patch, on the first tensor- and data-parallel rank of the stage.

    What happens in the last pipeline stage only, as losses do, the first rank of all may never come upon.
    """
    if message in application.said:
        return
    application.said.add(message)
    if _is_first_of_stage():
        application.speaks = True
        logger.warning("megatron_patch: %s", message)


def sum_up(application: Application, served: dict[str, int]) -> None:
    """At the end of a run: how many losses were served, where something was announced, and on the first rank of all."""
    if application.speaks or _rank() == 0:
        counts = ", ".join(f"{name} {count}" for name, count in served.items())
        logger.warning("megatron_patch: losses served in this process: %s", counts)


def _is_first_of_stage() -> bool:
    from megatron.core import parallel_state

    try:
        data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return bool(data == 0 and parallel_state.get_tensor_model_parallel_rank() == 0)
    except Exception:  # groups that Megatron's global state does not know of: whatever it then raises
        return _rank() == 0


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
