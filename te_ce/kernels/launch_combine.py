"""The combining kernel as a function of tensors, the same as `te_ce.reference.combine_statistics`."""

from __future__ import annotations

import functools

from torch import Tensor

from te_ce.kernels.combine import combine_statistics_kernel
from te_ce.kernels.launcher import Launch, launch
from te_ce.kernels.shapes import MERGE_TILE
from te_ce.problem import ShardProblem


def combine_statistics(gathered: Tensor, problem: ShardProblem) -> Tensor:
    """See `te_ce.reference.combine_statistics`."""
    n_parts, n_fields, n_rows = gathered.shape
    stats = gathered.new_empty((1, n_fields, n_rows))
    if n_rows:
        launch(
            combine_statistics_kernel, _combine_launch(gathered.get_device(), n_parts, n_rows, problem), gathered, stats
        )
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
