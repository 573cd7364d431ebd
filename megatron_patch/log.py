"""The log of the patch: warnings of every rank, news of the first one."""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger("megatron_patch")


def say(message: str, *arguments: object) -> None:
    """Log `message` at the level that a training run shows, on the first rank only."""
    if _rank() == 0:
        logger.warning(message, *arguments)


def say_from_this_stage(message: str, *arguments: object) -> None:
    """Log `message` likewise, on the first tensor- and data-parallel rank of this pipeline stage.

    What happens in the last stage only, as losses do, the first rank of all may never come upon.
    """
    if _is_first_of_stage():
        logger.warning(message, *arguments)


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
