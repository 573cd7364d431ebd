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


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
