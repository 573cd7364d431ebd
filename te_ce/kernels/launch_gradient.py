"""The gradient kernel as a function of tensors, the same as `te_ce.reference.logits_gradient`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from te_ce.kernels.gradient import logits_gradient_kernel
from te_ce.kernels.launcher import Launch, launch
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
from te_ce.kernels.shapes import LINE_BYTES, VECTOR_BYTES, architecture, gradient_registers, gradient_tile
from te_ce.layout import RowCut, cut_rows
from te_ce.outputs import OutputGrads
from te_ce.problem import ShardProblem

# Strides and dtype of a gradient or scale [..] of which the kernel reads a value a row; None: not given.
_RowKind = tuple[Strides, torch.dtype] | None


def logits_gradient(
    logits: Tensor,
    target: Tensor,
    grads: OutputGrads,
    saved: Tensor,
    out: Tensor,
    problem: ShardProblem,
    row_scale: Tensor | None = None,
) -> None:
    """See `te_ce.reference.logits_gradient`; one launch whatever gradients there are, where rows fold."""
    grad_loss, grad_log_probs, grad_entropy, grad_lse = grads
    of_rows = (grad_loss, grad_log_probs, grad_entropy, grad_lse, row_scale)
    kinds: tuple[_RowKind, ...]
    if grad_loss is not None and grad_log_probs is grad_entropy is grad_lse is row_scale is None:
        # The loss alone, which is called most: found without looking through the others.
        kinds = ((grad_loss.stride(), grad_loss.dtype), None, None, None, None)
    else:
        kinds = tuple(None if tensor is None else (tensor.stride(), tensor.dtype) for tensor in of_rows)
    strides = (logits.stride(), out.stride(), target.stride())
    out_at = out.data_ptr() % LINE_BYTES
    for place, first, how in _gradient_launches(
        layout_of(logits, target), strides, kinds, logits.shape[-1], out_at, problem
    ):
        launch(
            logits_gradient_kernel,
            how,
            rows_at(logits, place),
            rows_at(target, place),
            *(of_rows if not place else [None if tensor is None else tensor[place] for tensor in of_rows]),
            from_row(saved, first),
            rows_at(out, place),
        )


@functools.lru_cache(maxsize=256)
def _gradient_launches(
    layout: Layout,
    strides: tuple[Strides, Strides, Strides],
    kinds: tuple[_RowKind, ...],
    n_columns: int,
    out_at: int,
    problem: ShardProblem,
) -> Launches:
    """`strides` of logits, their gradient, which begins `out_at` bytes after a line, and target."""
    logits_stride, out_stride, target_stride = strides
    if n_columns == 0:
        return ()

    def launch_of(cut: RowCut) -> Launch:
        at = line_offset(layout.at, cut, logits_stride, layout.dtype)
        return _gradient_launch(
            layout, cut, kinds, n_columns, at, line_offset(out_at, cut, out_stride, layout.dtype), problem
        )

    of_rows = [kind[0] for kind in kinds if kind is not None]
    return launches_of(
        cut_rows(layout.shape, (logits_stride[:-1], out_stride[:-1], target_stride, *of_rows)), launch_of
    )


def _gradient_launch(
    layout: Layout,
    cut: RowCut,
    kinds: tuple[_RowKind, ...],
    n_columns: int,
    at: int,
    out_at: int,
    problem: ShardProblem,
) -> Launch:
    dtype, grid = layout.dtype, cut.grid
    tile = gradient_tile(dtype, n_columns)
    before = 0 if rows_begin_at(grid, 0, at, dtype, LINE_BYTES) else LINE_BYTES // dtype.itemsize - 1
    n_tiles = -(-(n_columns + before) // tile.elements)
    edges = n_columns * dtype.itemsize % VECTOR_BYTES != 0 or not rows_begin_at(grid, 0, at, dtype, VECTOR_BYTES)
    # A row of the gradient begins at the same place in a line as the row of the logits.
    alike = at == out_at and all(
        (step - out_step) * dtype.itemsize % LINE_BYTES == 0
        for step, out_step in zip(grid.strides[0], grid.strides[1], strict=True)
    )
    steps = iter(grid.strides)
    all_steps = [next(steps) for _ in range(3)] + [(0, 0) if kind is None else next(steps) for kind in kinds]
    _, _, entropy, _, row_scale = kinds
    has_more = problem.is_smoothed or problem.softcap is not None or row_scale is not None or grid.inner > 1
    return Launch(
        device=layout.device,
        dtypes=(dtype, layout.target_dtype, *(None if kind is None else kind[1] for kind in kinds)),
        programs=cut.n_rows * n_tiles,
        sizes=(
            grid.inner,
            *(step for pair in all_steps for step in pair),
            layout.shape.numel(),
            n_columns,
            n_tiles,
            problem.start,
            problem.real_columns,
            problem.classes,
            problem.ignore_index,
            problem.target_weight,
            problem.class_weight if problem.is_smoothed else None,
            2.0 * problem.z_loss_weight or None,
            problem.softcap,
            None if problem.scale == 1.0 else problem.scale,
        ),
        constants=(grid.inner > 1, edges, alike, tile.elements),
        num_warps=tile.num_warps,
        maxnreg=gradient_registers(architecture(layout.device), entropy is not None, has_more),
    )
