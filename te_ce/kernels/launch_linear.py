"""The kernels that only the linear loss needs as functions of tensors, the same as in `te_ce.reference`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from te_ce.kernels.combine import combine_statistics_kernel
from te_ce.kernels.launcher import Launch, launch
from te_ce.kernels.scaling import scaled_copy_kernel
from te_ce.kernels.shapes import MERGE_TILE, SCALING_TILE
from te_ce.problem import ShardProblem


def combine_statistics(gathered: Tensor, problem: ShardProblem) -> Tensor:
    """See `te_ce.reference.combine_statistics`."""
    n_parts, n_fields, n_rows = gathered.shape
    stats = gathered.new_empty((1, n_fields, n_rows))
    if n_rows:
        how = _combine_launch(gathered.get_device(), n_parts, n_rows, problem)
        launch(combine_statistics_kernel, how, gathered, stats)
    return stats


@functools.lru_cache(maxsize=64)
def _combine_launch(device: int, n_parts: int, n_rows: int, problem: ShardProblem) -> Launch:
    return Launch(
        device=device,
        dtypes=(),
        programs=-(-n_rows // MERGE_TILE.elements),
        sizes=(n_rows, n_parts),
        constants=(problem.is_smoothed, problem.has_entropy, problem.has_predictions, MERGE_TILE.elements),
        num_warps=MERGE_TILE.num_warps,
    )


def scaled_copy(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """See `te_ce.reference.scaled_copy`."""
    out = torch.empty_like(total, dtype=dtype)
    if total.numel():
        launch(scaled_copy_kernel, _scaling_launch(total.get_device(), total.numel(), dtype), total, factor, out)
    return out


@functools.lru_cache(maxsize=64)
def _scaling_launch(device: int, n_elements: int, dtype: torch.dtype) -> Launch:
    return Launch(
        device=device,
        dtypes=(dtype,),
        programs=-(-n_elements // SCALING_TILE.elements),
        sizes=(n_elements,),
        constants=(SCALING_TILE.elements,),
        num_warps=SCALING_TILE.num_warps,
    )
