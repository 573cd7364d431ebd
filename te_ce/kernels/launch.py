"""The kernels as functions of tensors, the same as `te_ce.reference`: grids, strides and constants.

Rows lie on grid axis 0, which has no 65,535 limit; row offsets are 64-bit inside the kernels. What a launch is made of
besides its tensors depends on their layout and on the problem only, and is kept from call to call.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from te_ce.kernels.blocks import block_statistics_kernel
from te_ce.kernels.launcher import Launch, launch
from te_ce.kernels.merge import merge_statistics_kernel
from te_ce.kernels.plans import (
    Launches,
    Layout,
    Strides,
    from_row,
    launches_of,
    layout_of,
    line_offset,
    rows_at,
    rows_begin_at,
)
from te_ce.kernels.shapes import BLOCKS_OF_A_PROGRAM, MERGE_TILE, VECTOR_BYTES, block_registers, block_shape, walk_plan
from te_ce.kernels.statistics import row_loss_kernel, row_statistics_kernel
from te_ce.layout import RowCut, RowGrid, cut_rows
from te_ce.outputs import OUTPUTS
from te_ce.problem import ShardProblem

# The kernels' arguments for the outputs, where none is asked for.
_NO_OUTPUTS = (None,) * len(OUTPUTS)


def row_statistics(logits: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None) -> Tensor:
    """See `te_ce.reference.row_statistics`; rows with neighbouring columns contiguous are read in place."""
    size = (problem.parts, _fields(problem), target.numel())
    stats = torch.empty(size, dtype=torch.float32, device=logits.device)
    scale_stride = None if row_scale is None else row_scale.stride()
    strides = (logits.stride(), target.stride(), scale_stride)
    kernel = block_statistics_kernel if problem.block else row_statistics_kernel
    for place, first, how in _statistics_launches(layout_of(logits, target), strides, problem):
        tensors = rows_at(logits, place), rows_at(target, place), from_row(stats, first)
        if row_scale is None:
            launch(kernel, how, *tensors)
        else:
            launch(kernel, how, *tensors, rows_at(row_scale, place))
    return stats


def row_loss(
    logits: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """See `te_ce.reference.row_loss`; one launch where rows are not split into parts."""
    if problem.parts > 1 or problem.block:
        return merge_statistics(row_statistics(logits, target, problem, row_scale), target, problem, row_scale)
    loss, saved, outputs = _results(target, problem)
    scale_stride = None if row_scale is None else row_scale.stride()
    strides = (logits.stride(), target.stride(), scale_stride)
    for place, first, how in _loss_launches(layout_of(logits, target), strides, problem):
        tensors = rows_at(logits, place), rows_at(target, place), from_row(loss, first), from_row(saved, first)
        if row_scale is None and not outputs:
            launch(row_loss_kernel, how, *tensors)
        else:
            scale = None if row_scale is None else rows_at(row_scale, place)
            launch(row_loss_kernel, how, *tensors, scale, *_outputs_from(outputs, problem, first))
    return loss, saved, outputs


def merge_statistics(
    gathered: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """See `te_ce.reference.merge_statistics`."""
    loss, saved, outputs = _results(target, problem)
    strides = (target.stride(), None if row_scale is None else row_scale.stride())
    for place, first, how in _merge_launches(layout_of(gathered, target), strides, gathered.shape[0], problem):
        tensors = from_row(gathered, first), rows_at(target, place), from_row(loss, first), from_row(saved, first)
        if row_scale is None and not outputs:
            launch(merge_statistics_kernel, how, *tensors)
        else:
            scale = None if row_scale is None else rows_at(row_scale, place)
            launch(merge_statistics_kernel, how, *tensors, scale, *_outputs_from(outputs, problem, first))
    return loss, saved, outputs


@functools.lru_cache(maxsize=64)
def _fields(problem: ShardProblem) -> int:
    return problem.fields


def _results(target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Loss [..], what is saved of it [saved_fields, N], and the outputs [..]."""
    # On the host half as dear as `torch.empty` with a shape and a device.
    loss = torch.empty_like(target, dtype=torch.float32, memory_format=torch.contiguous_format)
    if not problem.outputs:
        return loss, loss.new_empty((2, loss.numel())), ()
    dtypes = [torch.int64 if name == "predictions" else torch.float32 for name in problem.outputs]
    outputs = tuple(torch.empty_like(loss, dtype=dtype) for dtype in dtypes)
    return loss, loss.new_empty((problem.saved_fields, loss.numel())), outputs


def _outputs_from(outputs: tuple[Tensor, ...], problem: ShardProblem, first: int) -> list[Tensor | None]:
    """The outputs as the kernels take them, from row `first` on; None what is not asked for."""
    of_name = dict(zip(problem.outputs, outputs, strict=True))
    return [from_row(of_name[name], first) if name in of_name else None for name in OUTPUTS]


# Of logits, target, and the scale of the rows, where they have one.
_RowStrides = tuple[Strides, Strides, Strides | None]


@functools.lru_cache(maxsize=256)
def _statistics_launches(layout: Layout, strides: _RowStrides, problem: ShardProblem) -> Launches:
    if problem.block:
        return launches_of(_cuts(layout, strides), functools.partial(_block_launch, layout, strides, problem))
    return launches_of(_cuts(layout, strides), functools.partial(_walk_launch, layout, strides, problem, False))


@functools.lru_cache(maxsize=256)
def _loss_launches(layout: Layout, strides: _RowStrides, problem: ShardProblem) -> Launches:
    """Of the loss of whole rows."""
    return launches_of(_cuts(layout, strides), functools.partial(_walk_launch, layout, strides, problem, True))


def _cuts(layout: Layout, strides: _RowStrides) -> list[RowCut]:
    logits, target, scale = strides
    return cut_rows(layout.shape, (logits[:-1], target) if scale is None else (logits[:-1], target, scale))


def _walk_launch(layout: Layout, strides: _RowStrides, problem: ShardProblem, to_the_loss: bool, cut: RowCut) -> Launch:
    dtype, has_scale = layout.dtype, strides[2] is not None
    second_sum = problem.is_smoothed or problem.has_entropy
    shape, span_blocks, has_tail = walk_plan(dtype, problem.real_columns, problem.parts, second_sum)
    at = line_offset(layout.at, cut, strides[0], dtype)
    edges = has_tail or not rows_begin_at(cut.grid, 0, at, dtype, VECTOR_BYTES)
    absent, scale_dtype = _scale_arguments(has_scale)
    weights: tuple[float | None, ...] = ()
    output_dtypes: tuple[torch.dtype | None, ...] = ()
    if to_the_loss:
        weights = problem.smoothing_weight, problem.target_weight, problem.z_loss_weight or None
        output_dtypes = _output_dtypes(problem)
        # Without a scale and without outputs, all are left out of the call.
        absent = () if has_scale or problem.outputs else (None, *_NO_OUTPUTS)
    return Launch(
        device=layout.device,
        dtypes=(dtype, layout.target_dtype, scale_dtype, *output_dtypes),
        programs=cut.n_rows * problem.parts,
        sizes=(
            *absent,
            *_row_sizes(cut.grid, has_scale),
            layout.shape.numel(),
            span_blocks,
            *_shard_sizes(problem),
            *weights,
        ),
        constants=(
            cut.grid.inner > 1,
            edges,
            *_statistics_flags(problem),
            *(() if to_the_loss else (problem.parts,)),
            shape.unroll,
            shape.threads,
        ),
        num_warps=shape.num_warps,
    )


def _block_launch(layout: Layout, strides: _RowStrides, problem: ShardProblem, cut: RowCut) -> Launch:
    """No constant depends on how the vocabulary is cut, nor on where rows lie: the code is one for all of them."""
    shape = block_shape(layout.dtype, problem.block)
    has_scale = strides[2] is not None
    absent, scale_dtype = _scale_arguments(has_scale)
    groups = -(-problem.parts // BLOCKS_OF_A_PROGRAM)
    # A tanh takes as many registers as two sums, a scale as one.
    is_scaled = has_scale or problem.scale != 1.0
    extras = sum(_statistics_flags(problem)) + 2 * (problem.softcap is not None) + is_scaled
    return Launch(
        device=layout.device,
        dtypes=(layout.dtype, layout.target_dtype, scale_dtype),
        programs=cut.n_rows * groups,
        sizes=(
            *absent,
            *_row_sizes(cut.grid, has_scale),
            layout.shape.numel(),
            problem.parts,
            groups,
            BLOCKS_OF_A_PROGRAM,
            *_shard_sizes(problem),
        ),
        constants=(*_statistics_flags(problem), shape.unroll, shape.threads),
        num_warps=shape.num_warps,
        maxnreg=block_registers(extras),
    )


def _scale_arguments(has_scale: bool) -> tuple[tuple[None, ...], torch.dtype | None]:
    """What stands for the scale of the rows among the arguments, unless it is given, and its dtype."""
    return ((), torch.float32) if has_scale else ((None,), None)


def _row_sizes(grid: RowGrid, has_scale: bool) -> tuple[int, ...]:
    """inner, and the strides of logits, target and scale."""
    return (grid.inner, *grid.flat_strides, *(() if has_scale else (0, 0)))


def _shard_sizes(problem: ShardProblem) -> tuple[int | float | None, ...]:
    return problem.start, problem.real_columns, problem.ignore_index, problem.softcap, *scale_sizes(problem)


def scale_sizes(problem: ShardProblem) -> tuple[float | None, float | None]:
    """The scale of all rows, and what float32 leaves of it."""
    if problem.scale == 1.0:
        return None, None
    return problem.scale, problem.scale - struct.unpack("f", struct.pack("f", problem.scale))[0]


def _statistics_flags(problem: ShardProblem) -> tuple[bool, bool, bool]:
    return problem.is_smoothed, problem.has_entropy, problem.has_predictions


def _output_dtypes(problem: ShardProblem) -> tuple[torch.dtype | None, ...]:
    """Which outputs there are: None what is not asked for."""
    return tuple((torch.float32 if name in problem.outputs else None) for name in OUTPUTS)


@functools.lru_cache(maxsize=256)
def _merge_launches(
    layout: Layout, strides: tuple[Strides, Strides | None], n_parts: int, problem: ShardProblem
) -> Launches:
    """`strides` of target, and of the scale of the rows, where they have one."""
    target_stride, scale_stride = strides
    # Without a scale and without outputs, all are left out of the call.
    absent = (None, *_NO_OUTPUTS) if scale_stride is None and not problem.outputs else ()
    scale_dtype = None if scale_stride is None else torch.float32

    def launch_of(cut: RowCut) -> Launch:
        return Launch(
            device=layout.device,
            dtypes=(layout.target_dtype, scale_dtype, *_output_dtypes(problem)),
            programs=-(-cut.n_rows // MERGE_TILE.elements),
            sizes=(
                *absent,
                cut.n_rows,
                n_parts,
                layout.shape.numel(),
                cut.grid.inner,
                *cut.grid.flat_strides[:2],
                problem.classes,
                problem.ignore_index,
                problem.smoothing_weight,
                problem.target_weight,
                problem.z_loss_weight or None,
                *(cut.grid.flat_strides[2:] or (0, 0)),
                *scale_sizes(problem),
            ),
            constants=(
                cut.grid.inner > 1,
                *_statistics_flags(problem),
                problem.block > 0,
                MERGE_TILE.elements,
            ),
            num_warps=MERGE_TILE.num_warps,
        )

    each = (target_stride,) if scale_stride is None else (target_stride, scale_stride)
    return launches_of(cut_rows(layout.shape, each), launch_of)
