"""What statistics and gradient share: rows in slices, their logits as u, and which target is whose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from te_ce.layout import row_slices
from te_ce.problem import ShardProblem

# Elements of the float32 working copy. It stays in the cache of one core and is small beside any logits.
_SLICE_ELEMENTS = 1 << 20


def slices(logits: Tensor) -> Iterator[tuple[slice, tuple[int | slice, ...]]]:
    """See `te_ce.layout.row_slices`."""
    return row_slices(logits.shape[:-1], max(1, _SLICE_ELEMENTS // max(1, logits.shape[-1])))


def statistics_dtype(logits: Tensor) -> torch.dtype:
    """float32, or float64 for float64 logits."""
    return torch.promote_types(logits.dtype, torch.float32)


def real_columns(logits: Tensor, problem: ShardProblem) -> Tensor:
    """The real columns as a fresh [rows, K] copy in the dtype of the statistics."""
    real = logits[..., : problem.real_columns]
    return real.to(statistics_dtype(logits), copy=True).reshape(real.shape[:-1].numel(), problem.real_columns)


class Scale(NamedTuple):
    """A scale as direction times size, [rows] each or [1] for all, in double; z = size u."""

    direction: Tensor
    size: Tensor


def split_scale(problem: ShardProblem, row_scale: Tensor | None, device: torch.device) -> Scale | None:
    """Sign and absolute value; None without a scale.

    A scale of 0 is a direction 0 of size 1: sizes are multiplied with infinities.

    Args:
        row_scale: [rows], or None: `problem.scale`.
    """
    if row_scale is None and problem.scale == 1.0:
        return None
    if row_scale is None:
        row_scale = torch.full((1,), problem.scale, dtype=torch.float64, device=device)
    scale = row_scale.double()
    return Scale(scale.sign(), torch.where(scale == 0.0, 1.0, scale.abs()))


def times_size(x: Tensor, scale: Scale | None) -> Tensor:
    """A difference or sum of u [.., rows], of z; rounded once."""
    return x if scale is None else (x * scale.size).to(x.dtype)


def transform(x: Tensor, problem: ShardProblem, scale: Scale | None) -> tuple[Tensor, Tensor | None]:
    """u = direction cap tanh(x / cap) in place of x [rows, K], and tanh(x / cap) where there is a softcap."""
    tanh = None
    if problem.softcap is not None:
        tanh = x.div_(problem.softcap).tanh_().clone()
        x.mul_(problem.softcap)
    if scale is not None:
        x.mul_(scale.direction[:, None])
    return x, tanh


def local_target(target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor]:
    """Whether the target is one of this shard's real columns, and that column (0 where it is not)."""
    owned = (target >= problem.start) & (target < problem.start + problem.real_columns)
    return owned, torch.where(owned, target - problem.start, 0)


def is_class(target: Tensor, problem: ShardProblem) -> Tensor:
    """Whether the target is a class, of any shard."""
    return (target >= 0) & (target < problem.classes)
