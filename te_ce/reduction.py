"""Reduction of the rows' losses to what the caller asked for."""

from __future__ import annotations

from torch import Tensor


def reduce_loss(loss: Tensor, target: Tensor, reduction: str, ignore_index: int) -> Tensor:
    """Losses [..] as they are ("none"), their sum, or their mean over the rows not ignored (0 where there are none)."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    # In 64 bits: an int32 target compared with a larger ignore_index would wrap.
    return loss.sum() / (target.long() != ignore_index).sum().clamp(min=1)
