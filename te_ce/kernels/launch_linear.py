"""The kernels that only the linear loss needs as functions of tensors, the same as in `te_ce.reference`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from te_ce.kernels.combine import combine_statistics_kernel
from te_ce.kernels.launch import scale_sizes
from te_ce.kernels.launcher import Launch, launch
from te_ce.kernels.scaling import scaled_copy_kernel
from te_ce.kernels.shapes import MERGE_TILE, SCALING_TILE
from te_ce.problem import ShardProblem


def combine_statistics(gathered: Tensor, problem: ShardProblem, row_scale: Tensor | None = None) -> Tensor:
    """See `te_ce.reference.combine_statistics`."""
    n_parts, n_fields, n_rows = gathered.shape
    stats = gathered.new_empty((1, n_fields, n_rows))
    if n_rows:
        how = _combine_launch(gathered.get_device(), n_parts, n_rows, row_scale is not None, problem)
        scale = None if row_scale is None else row_scale.contiguous()
        launch(combine_statistics_kernel, how, gathered, stats, scale)
    return stats


@functools.lru_cache(maxsize=64)
def _combine_launch(device: int, n_parts: int, n_rows: int, has_row_scale: bool, problem: ShardProblem) -> Launch:
    return Launch(
        device=device,
        dtypes=(torch.float32 if has_row_scale else None,),
        programs=-(-n_rows // MERGE_TILE.elements),
        sizes=(n_rows, n_parts, *scale_sizes(problem)),
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
