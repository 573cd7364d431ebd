"""The kernels as functions of tensors, the same as `te_ce.reference`: grids, strides and constants.

Rows lie on grid axis 0, which has no 65,535 limit; row offsets are 64-bit inside the kernels. What a launch is made of
besides its tensors depends on their layout and on the problem only, and is kept from call to call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from te_ce.kernels.gradient import logits_gradient_kernel
from te_ce.kernels.launcher import Launch, launch
from te_ce.kernels.merge import merge_statistics_kernel
from te_ce.kernels.shapes import LINE_BYTES, MERGE_TILE, VECTOR_BYTES, gradient_tile, walk_plan
from te_ce.kernels.statistics import row_loss_kernel, row_statistics_kernel
from te_ce.layout import RowGrid, row_parts
from te_ce.problem import ShardProblem


def row_statistics(logits: Tensor, target: Tensor, problem: ShardProblem) -> Tensor:
    """See `te_ce.reference.row_statistics`; rows with neighbouring columns contiguous are read in place."""
    n_rows, parts = target.numel(), problem.parts
    stats = torch.empty((parts, problem.fields, n_rows), dtype=torch.float32, device=logits.device)
    if n_rows == 0:
        return stats
    for part in row_parts(target.shape, (logits, target)):
        at = part.tensors[0].data_ptr() % LINE_BYTES
        tensors = (*part.tensors, stats[:, :, part.first :] if part.first else stats)
        launch(
            row_statistics_kernel,
            tensors,
            _walk_launch(part.grid, part.n_rows, n_rows, at, logits.dtype, problem, False),
        )
    return stats


def row_loss(logits: Tensor, target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor]:
    """See `te_ce.reference.row_loss`; one launch where rows are not split into parts."""
    if problem.parts > 1:
        return merge_statistics(row_statistics(logits, target, problem), target, problem)
    n_rows = target.numel()
    loss, saved = _outputs(target)
    if n_rows == 0:
        return loss, saved
    for part in row_parts(target.shape, (logits, target)):
        at = part.tensors[0].data_ptr() % LINE_BYTES
        tensors = (*part.tensors, *_from_row(part.first, loss, saved))
        launch(row_loss_kernel, tensors, _walk_launch(part.grid, part.n_rows, n_rows, at, logits.dtype, problem, True))
    return loss, saved


def merge_statistics(gathered: Tensor, target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor]:
    """See `te_ce.reference.merge_statistics`."""
    n_parts, _, n_rows = gathered.shape
    loss, saved = _outputs(target)
    if n_rows == 0:
        return loss, saved
    for part in row_parts(target.shape, (target,)):
        rows = gathered[:, :, part.first :] if part.first else gathered
        tensors = (rows, *part.tensors, *_from_row(part.first, loss, saved))
        launch(merge_statistics_kernel, tensors, _merge_launch(part.grid, part.n_rows, n_rows, n_parts, problem))
    return loss, saved


def logits_gradient(
    logits: Tensor, target: Tensor, grad_loss: Tensor, saved: Tensor, out: Tensor, problem: ShardProblem
) -> None:
    """See `te_ce.reference.logits_gradient`."""
    n_columns = logits.shape[-1]
    if logits.numel() == 0:
        return
    for part in row_parts(target.shape, (logits, target, grad_loss, out)):
        logits_part, target_part, grad_part, out_part = part.tensors
        at, out_at = logits_part.data_ptr() % LINE_BYTES, out_part.data_ptr() % LINE_BYTES
        tensors = (logits_part, target_part, grad_part, saved[:, part.first :] if part.first else saved, out_part)
        launch(
            logits_gradient_kernel,
            tensors,
            _gradient_launch(part.grid, part.n_rows, saved.shape[1], n_columns, at, out_at, logits.dtype, problem),
        )


# The arguments of the functions below: `grid` and `n_rows` of a part of a call of `all_rows` rows; `at`, the bytes by
# which the logits begin after a line of memory does.


@functools.lru_cache(maxsize=256)
def _walk_launch(
    grid: RowGrid, n_rows: int, all_rows: int, at: int, dtype: torch.dtype, problem: ShardProblem, to_the_loss: bool
) -> Launch:
    """Of the statistics, or of the loss of whole rows."""
    shape, span_blocks, has_tail = walk_plan(dtype, problem.real_columns, problem.parts, problem.is_smoothed)
    edges = has_tail or not _begin_at(grid, 0, at, dtype, VECTOR_BYTES)
    weights = (problem.smoothing_weight, problem.target_weight) if to_the_loss else ()
    parts = () if to_the_loss else (problem.parts,)
    return Launch(
        programs=n_rows * problem.parts,
        sizes=(
            grid.inner,
            *grid.flat_strides,
            all_rows,
            span_blocks,
            problem.start,
            problem.real_columns,
            problem.ignore_index,
            *weights,
        ),
        constants=(grid.inner > 1, edges, problem.is_smoothed, *parts, shape.unroll, shape.threads),
        num_warps=shape.num_warps,
    )


@functools.lru_cache(maxsize=256)
def _merge_launch(grid: RowGrid, n_rows: int, all_rows: int, n_parts: int, problem: ShardProblem) -> Launch:
    return Launch(
        programs=-(-n_rows // MERGE_TILE.elements),
        sizes=(
            n_rows,
            n_parts,
            all_rows,
            grid.inner,
            *grid.flat_strides,
            problem.classes,
            problem.ignore_index,
            problem.smoothing_weight,
            problem.target_weight,
        ),
        constants=(grid.inner > 1, problem.is_smoothed, MERGE_TILE.elements),
        num_warps=MERGE_TILE.num_warps,
    )


@functools.lru_cache(maxsize=256)
def _gradient_launch(
    grid: RowGrid,
    n_rows: int,
    all_rows: int,
    n_columns: int,
    at: int,
    out_at: int,
    dtype: torch.dtype,
    problem: ShardProblem,
) -> Launch:
    tile = gradient_tile(dtype, n_columns)
    before = 0 if _begin_at(grid, 0, at, dtype, LINE_BYTES) else LINE_BYTES // dtype.itemsize - 1
    n_tiles = -(-(n_columns + before) // tile.elements)
    edges = n_columns * dtype.itemsize % VECTOR_BYTES != 0 or not _begin_at(grid, 0, at, dtype, VECTOR_BYTES)
    # A row of the gradient begins at the same place in a line as the row of the logits.
    alike = at == out_at and all(
        (step - out_step) * dtype.itemsize % LINE_BYTES == 0
        for step, out_step in zip(grid.strides[0], grid.strides[3], strict=True)
    )
    return Launch(
        programs=n_rows * n_tiles,
        sizes=(
            grid.inner,
            *grid.flat_strides,
            all_rows,
            n_columns,
            n_tiles,
            problem.start,
            problem.real_columns,
            problem.classes,
            problem.ignore_index,
            problem.target_weight,
            problem.class_weight,
        ),
        constants=(grid.inner > 1, edges, problem.is_smoothed, alike, tile.elements),
        num_warps=tile.num_warps,
    )


def _begin_at(grid: RowGrid, index: int, at: int, dtype: torch.dtype, multiple: int) -> bool:
    """Whether all rows of tensor `index`, which begins `at` bytes after a line, begin at multiples of so many bytes."""
    return at % multiple == 0 and all(step * dtype.itemsize % multiple == 0 for step in grid.strides[index])


def _outputs(target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss [..] and what is saved of it [2, N]."""
    loss = torch.empty(target.shape, dtype=torch.float32, device=target.device)
    return loss, torch.empty((2, target.numel()), dtype=torch.float32, device=target.device)


def _from_row(first: int, loss: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs from row `first` on."""
    return (loss.view(-1)[first:], saved[:, first:]) if first else (loss, saved)
