"""The kernels as functions of tensors, the same as `te_ce.reference`: grids, strides and constants.

Rows lie on grid axis 0, which has no 65,535 limit; row offsets are 64-bit inside the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_ce.kernels.gradient import logits_gradient_kernel
from te_ce.kernels.launcher import launch
from te_ce.kernels.merge import merge_statistics_kernel
from te_ce.kernels.shapes import LINE_BYTES, MERGE_TILE, VECTOR_BYTES, gradient_tile, walk_plan
from te_ce.kernels.statistics import row_loss_kernel, row_statistics_kernel
from te_ce.layout import RowPart, row_parts
from te_ce.problem import ShardProblem


def row_statistics(logits: Tensor, target: Tensor, problem: ShardProblem) -> Tensor:
    """See `te_ce.reference.row_statistics`; rows with neighbouring columns contiguous are read in place."""
    n_rows, parts = target.numel(), problem.parts
    stats = torch.empty((parts, problem.fields, n_rows), dtype=torch.float32, device=logits.device)
    if n_rows == 0:
        return stats
    for part in row_parts(target.shape, (logits, target)):
        shape, line, span_blocks, has_tail = walk_plan(logits.dtype, problem.real_columns, parts)
        edges = has_tail or not _begin_at(part, 0, line)
        launch(
            row_statistics_kernel,
            part.n_rows * parts,
            (*part.tensors, stats[:, :, part.first :] if part.first else stats),
            (
                part.grid.inner,
                *part.grid.flat_strides,
                n_rows,
                span_blocks,
                problem.start,
                problem.real_columns,
                problem.ignore_index,
            ),
            (part.grid.inner > 1, edges, problem.is_smoothed, parts, shape.unroll, shape.threads, line),
            shape.num_warps,
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
        shape, line, span_blocks, has_tail = walk_plan(logits.dtype, problem.real_columns, 1)
        edges = has_tail or not _begin_at(part, 0, line)
        launch(
            row_loss_kernel,
            part.n_rows,
            (*part.tensors, *_from_row(part.first, loss, saved)),
            (
                part.grid.inner,
                *part.grid.flat_strides,
                n_rows,
                span_blocks,
                problem.start,
                problem.real_columns,
                problem.ignore_index,
                problem.smoothing_weight,
                problem.target_weight,
            ),
            (part.grid.inner > 1, edges, problem.is_smoothed, shape.unroll, shape.threads, line),
            shape.num_warps,
        )
    return loss, saved


def merge_statistics(gathered: Tensor, target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor]:
    """See `te_ce.reference.merge_statistics`."""
    n_parts, _, n_rows = gathered.shape
    loss, saved = _outputs(target)
    if n_rows == 0:
        return loss, saved
    for part in row_parts(target.shape, (target,)):
        launch(
            merge_statistics_kernel,
            -(-part.n_rows // MERGE_TILE.elements),
            (
                gathered[:, :, part.first :] if part.first else gathered,
                *part.tensors,
                *_from_row(part.first, loss, saved),
            ),
            (
                part.n_rows,
                n_parts,
                n_rows,
                part.grid.inner,
                *part.grid.flat_strides,
                problem.classes,
                problem.ignore_index,
                problem.smoothing_weight,
                problem.target_weight,
            ),
            (part.grid.inner > 1, problem.is_smoothed, MERGE_TILE.elements),
            MERGE_TILE.num_warps,
        )
    return loss, saved


def logits_gradient(
    logits: Tensor, target: Tensor, grad_loss: Tensor, saved: Tensor, out: Tensor, problem: ShardProblem
) -> None:
    """See `te_ce.reference.logits_gradient`."""
    n_columns = logits.shape[-1]
    if logits.numel() == 0:
        return
    dtype = logits.dtype
    tile = gradient_tile(dtype, n_columns)
    for part in row_parts(target.shape, (logits, target, grad_loss, out)):
        logits_part, target_part, grad_part, out_part = part.tensors
        before = 0 if _begin_at(part, 0, LINE_BYTES) else LINE_BYTES // dtype.itemsize - 1
        n_tiles = -(-(n_columns + before) // tile.elements)
        launch(
            logits_gradient_kernel,
            part.n_rows * n_tiles,
            (logits_part, target_part, grad_part, saved[:, part.first :] if part.first else saved, out_part),
            (
                part.grid.inner,
                *part.grid.flat_strides,
                saved.shape[1],
                n_columns,
                n_tiles,
                problem.start,
                problem.real_columns,
                problem.classes,
                problem.ignore_index,
                problem.target_weight,
                problem.class_weight,
            ),
            (
                part.grid.inner > 1,
                not _begin_at(part, 0, VECTOR_BYTES) or n_columns * dtype.itemsize % VECTOR_BYTES != 0,
                problem.is_smoothed,
                _aligned_alike(part, 0, 3),
                tile.elements,
            ),
            tile.num_warps,
        )


def _outputs(target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss [..] and what is saved of it [2, N]."""
    loss = torch.empty(target.shape, dtype=torch.float32, device=target.device)
    return loss, torch.empty((2, target.numel()), dtype=torch.float32, device=target.device)


def _from_row(first: int, loss: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs from row `first` on."""
    return (loss.view(-1)[first:], saved[:, first:]) if first else (loss, saved)


def _begin_at(part: RowPart, index: int, multiple: int) -> bool:
    """Whether all rows of a tensor of the part begin at a multiple of so many bytes."""
    tensor, (outer, inner) = part.tensors[index], part.grid.strides[index]
    size = tensor.element_size()
    return tensor.data_ptr() % multiple == 0 and outer * size % multiple == 0 and inner * size % multiple == 0


def _aligned_alike(part: RowPart, index: int, other: int) -> bool:
    """Whether the rows of two tensors of the part begin at the same place within a line."""
    tensor = part.tensors[index]
    if (tensor.data_ptr() - part.tensors[other].data_ptr()) % LINE_BYTES:
        return False
    return not any(
        (mine - its) * tensor.element_size() % LINE_BYTES
        for mine, its in zip(part.grid.strides[index], part.grid.strides[other], strict=True)
    )
