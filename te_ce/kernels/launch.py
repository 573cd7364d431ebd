"""The kernels as functions of tensors, the same as `te_ce.reference`: grids, strides and constants.

Rows lie on grid axis 0, which has no 65,535 limit; row offsets are 64-bit inside the kernels. What a launch is made of
besides its tensors depends on their layout and on the problem only, and is kept from call to call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from te_ce.kernels.gradient import logits_gradient_kernel
from te_ce.kernels.launcher import Launch, launch
from te_ce.kernels.merge import merge_statistics_kernel
from te_ce.kernels.shapes import LINE_BYTES, MERGE_TILE, VECTOR_BYTES, gradient_tile, walk_plan
from te_ce.kernels.statistics import row_loss_kernel, row_statistics_kernel
from te_ce.layout import RowCut, RowGrid, cut_rows
from te_ce.problem import ShardProblem

Strides = tuple[int, ...]


def row_statistics(logits: Tensor, target: Tensor, problem: ShardProblem) -> Tensor:
    """See `te_ce.reference.row_statistics`; rows with neighbouring columns contiguous are read in place."""
    size = (problem.parts, problem.fields, target.numel())
    stats = torch.empty(size, dtype=torch.float32, device=logits.device)
    for place, first, how in _walk_launches(_layout(logits, target), logits.stride(), target.stride(), problem, False):
        launch(row_statistics_kernel, how, _rows(logits, place), _rows(target, place), _from_row(stats, first))
    return stats


def row_loss(logits: Tensor, target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor]:
    """See `te_ce.reference.row_loss`; one launch where rows are not split into parts."""
    if problem.parts > 1:
        return merge_statistics(row_statistics(logits, target, problem), target, problem)
    loss, saved = _outputs(target)
    for place, first, how in _walk_launches(_layout(logits, target), logits.stride(), target.stride(), problem, True):
        tensors = (_rows(logits, place), _rows(target, place), _from_row(loss, first), _from_row(saved, first))
        launch(row_loss_kernel, how, *tensors)
    return loss, saved


def merge_statistics(gathered: Tensor, target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor]:
    """See `te_ce.reference.merge_statistics`."""
    loss, saved = _outputs(target)
    for place, first, how in _merge_launches(_layout(gathered, target), target.stride(), gathered.shape[0], problem):
        tensors = (_from_row(gathered, first), _rows(target, place), _from_row(loss, first), _from_row(saved, first))
        launch(merge_statistics_kernel, how, *tensors)
    return loss, saved


def logits_gradient(
    logits: Tensor, target: Tensor, grad_loss: Tensor, saved: Tensor, out: Tensor, problem: ShardProblem
) -> None:
    """See `te_ce.reference.logits_gradient`."""
    strides = (logits.stride(), target.stride(), grad_loss.stride(), out.stride())
    out_at = out.data_ptr() % LINE_BYTES
    for place, first, how in _gradient_launches(
        _layout(logits, target), strides, logits.shape[-1], out_at, grad_loss.dtype, problem
    ):
        tensors = (
            _rows(logits, place),
            _rows(target, place),
            _rows(grad_loss, place),
            _from_row(saved, first),
        )
        launch(logits_gradient_kernel, how, *tensors, _rows(out, place))


def _rows(tensor: Tensor, place: tuple[int, ...]) -> Tensor:
    return tensor[place] if place else tensor


def _from_row(tensor: Tensor, first: int) -> Tensor:
    """[.., N], contiguous, as the kernels take it: row `first` of the first field is where it begins."""
    return tensor.view(-1)[first:] if first else tensor


def _outputs(target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss [..] and what is saved of it [2, N]."""
    # On the host half as dear as `torch.empty` with a shape and a device.
    loss = torch.empty_like(target, dtype=torch.float32, memory_format=torch.contiguous_format)
    return loss, loss.new_empty((2, loss.numel()))


class _Layout(NamedTuple):
    """What the launches of a call depend on besides strides; `at` counts the bytes from a line to the first tensor."""

    shape: torch.Size  # of the rows
    dtype: torch.dtype  # of the first tensor
    target_dtype: torch.dtype
    device: int
    at: int


def _layout(tensor: Tensor, target: Tensor) -> _Layout:
    return _Layout(target.shape, tensor.dtype, target.dtype, tensor.get_device(), tensor.data_ptr() % LINE_BYTES)


# The launches of a call, mostly one: the place of their rows in the tensors, the number of the first one, the launch.
_Launches = tuple[tuple[tuple[int, ...], int, Launch], ...]


def _launches(cuts: list[RowCut], launch_of: Callable[[RowCut], Launch]) -> _Launches:
    """Launches of the cuts that have rows; those that differ in addresses only share one."""
    distinct: dict[object, Launch] = {}
    launches = []
    for cut in cuts:
        if cut.n_rows:
            how = launch_of(cut)
            launches.append((cut.place, cut.first, distinct.setdefault((how.programs, how.sizes, how.constants), how)))
    return tuple(launches)


@functools.lru_cache(maxsize=256)
def _walk_launches(
    layout: _Layout, logits_stride: Strides, target_stride: Strides, problem: ShardProblem, to_the_loss: bool
) -> _Launches:
    """Of the statistics, or of the loss of whole rows."""
    dtype = layout.dtype
    shape, span_blocks, has_tail = walk_plan(dtype, problem.real_columns, problem.parts, problem.is_smoothed)
    weights = (problem.smoothing_weight, problem.target_weight) if to_the_loss else ()
    parts = () if to_the_loss else (problem.parts,)

    def launch_of(cut: RowCut) -> Launch:
        edges = has_tail or not _begin_at(cut.grid, 0, _at(layout.at, cut, logits_stride, dtype), dtype, VECTOR_BYTES)
        return Launch(
            device=layout.device,
            dtypes=(dtype, layout.target_dtype),
            programs=cut.n_rows * problem.parts,
            sizes=(
                cut.grid.inner,
                *cut.grid.flat_strides,
                layout.shape.numel(),
                span_blocks,
                problem.start,
                problem.real_columns,
                problem.ignore_index,
                *weights,
            ),
            constants=(cut.grid.inner > 1, edges, problem.is_smoothed, *parts, shape.unroll, shape.threads),
            num_warps=shape.num_warps,
        )

    return _launches(cut_rows(layout.shape, (logits_stride[:-1], target_stride)), launch_of)


@functools.lru_cache(maxsize=256)
def _merge_launches(layout: _Layout, target_stride: Strides, n_parts: int, problem: ShardProblem) -> _Launches:
    def launch_of(cut: RowCut) -> Launch:
        return Launch(
            device=layout.device,
            dtypes=(layout.target_dtype,),
            programs=-(-cut.n_rows // MERGE_TILE.elements),
            sizes=(
                cut.n_rows,
                n_parts,
                layout.shape.numel(),
                cut.grid.inner,
                *cut.grid.flat_strides,
                problem.classes,
                problem.ignore_index,
                problem.smoothing_weight,
                problem.target_weight,
            ),
            constants=(cut.grid.inner > 1, problem.is_smoothed, MERGE_TILE.elements),
            num_warps=MERGE_TILE.num_warps,
        )

    return _launches(cut_rows(layout.shape, (target_stride,)), launch_of)


@functools.lru_cache(maxsize=256)
def _gradient_launches(
    layout: _Layout,
    strides: tuple[Strides, ...],
    n_columns: int,
    out_at: int,
    grad_dtype: torch.dtype,
    problem: ShardProblem,
) -> _Launches:
    """`strides` of logits, target, gradient of the loss, and gradient of the logits, which begins at `out_at`."""
    logits_stride, target_stride, grad_stride, out_stride = strides
    if n_columns == 0:
        return ()

    def launch_of(cut: RowCut) -> Launch:
        at = _at(layout.at, cut, logits_stride, layout.dtype)
        return _gradient_launch(
            layout, cut, n_columns, at, _at(out_at, cut, out_stride, layout.dtype), grad_dtype, problem
        )

    return _launches(
        cut_rows(layout.shape, (logits_stride[:-1], target_stride, grad_stride, out_stride[:-1])), launch_of
    )


def _gradient_launch(
    layout: _Layout,
    cut: RowCut,
    n_columns: int,
    at: int,
    out_at: int,
    grad_dtype: torch.dtype,
    problem: ShardProblem,
) -> Launch:
    dtype, grid = layout.dtype, cut.grid
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
        device=layout.device,
        dtypes=(dtype, layout.target_dtype, grad_dtype),
        programs=cut.n_rows * n_tiles,
        sizes=(
            grid.inner,
            *grid.flat_strides,
            layout.shape.numel(),
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


def _at(at: int, cut: RowCut, strides: Strides, dtype: torch.dtype) -> int:
    """Bytes from a line to the rows of `cut`, of a tensor that begins `at` bytes after one."""
    offset = sum(step * stride for step, stride in zip(cut.place, strides, strict=False))
    return (at + offset * dtype.itemsize) % LINE_BYTES


def _begin_at(grid: RowGrid, index: int, at: int, dtype: torch.dtype, multiple: int) -> bool:
    """Whether all rows of tensor `index`, which begins `at` bytes after a line, begin at multiples of so many bytes."""
    return at % multiple == 0 and all(step * dtype.itemsize % multiple == 0 for step in grid.strides[index])
