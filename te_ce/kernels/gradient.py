"""Gradient of the logits, recomputed from the row statistics: one read, one write, one rounding.

A program owns one tile of one row, so reading and overwriting the same storage is safe: nothing else touches the tile.
The p_y - 1 of the target is formed in float32 before the store; forming it from a rounded p_y loses it as p_y -> 1.

Tiles are cut at lines of memory, not at columns: loads and stores are of whole vectors of 16 bytes. The columns
before the first and after the last whole vector of a row (odd vocabularies) are done one by one by its first program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.numerics import LOG2_E
from te_ce.kernels.rows import at_row, floor_to_line

_UNSPECIALIZED = [
    "logits_ptr",
    "target_ptr",
    "grad_loss_ptr",
    "saved_ptr",
    "grad_logits_ptr",
    "inner",
    "logits_stride_outer",
    "logits_stride_inner",
    "target_stride_outer",
    "target_stride_inner",
    "grad_loss_stride_outer",
    "grad_loss_stride_inner",
    "grad_logits_stride_outer",
    "grad_logits_stride_inner",
    "saved_stride",
    "n_columns",
    "n_tiles",
    "start",
    "real_columns",
    "classes",
    "ignore_index",
    "target_weight",
    "class_weight",
]


@triton.jit
def _gradient(
    z,
    column,  # of the same shape
    m,
    scale,  # g / d
    of_target,  # g (1 - a')
    of_class,  # g a'/V
    target_column,
    real_columns,
    IS_SPECIAL: tl.constexpr,  # the target or padding may be among the columns
    HAS_SMOOTHING: tl.constexpr,
):
    grad = tl.exp2((z.to(tl.float32) - m) * LOG2_E) * scale
    if HAS_SMOOTHING:
        grad -= of_class
    if IS_SPECIAL:
        grad = tl.where(column == target_column, grad - of_target, grad)
        grad = tl.where(column < real_columns, grad, 0.0)
    return grad


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def logits_gradient_kernel(
    # inputs
    logits_ptr,  # [.., V_local] float32, bfloat16 or float16
    target_ptr,  # [..] int64 or int32
    grad_loss_ptr,  # [..] float32
    saved_ptr,  # [2, N] float32: m, d of the whole row
    # output
    grad_logits_ptr,  # [.., V_local], dtype of the logits; may be logits_ptr
    # sizes
    inner,  # row i is (i // inner, i % inner)
    logits_stride_outer: tl.int64,
    logits_stride_inner: tl.int64,
    target_stride_outer: tl.int64,
    target_stride_inner: tl.int64,
    grad_loss_stride_outer: tl.int64,
    grad_loss_stride_inner: tl.int64,
    grad_logits_stride_outer: tl.int64,
    grad_logits_stride_inner: tl.int64,
    saved_stride: tl.int64,  # between fields
    n_columns,  # V_local
    n_tiles,  # tiles per row
    start: tl.int64,  # global id of column 0
    real_columns,  # K, columns at or past it are padding
    classes: tl.int64,  # V
    ignore_index: tl.int64,
    target_weight: tl.float32,  # 1 - a'
    class_weight: tl.float32,  # a'/V
    # constants
    HAS_INNER: tl.constexpr,
    HAS_EDGES: tl.constexpr,  # rows begin or end inside a vector
    HAS_SMOOTHING: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,  # a row of the gradient begins at the same place in a vector as one of the logits
    TILE: tl.constexpr,
):
    VEC: tl.constexpr = 16 // (logits_ptr.dtype.element_ty.primitive_bitwidth // 8)
    # From the end: what forward read last may still lie in the cache, and who reads the gradient begins at its start.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, tile = index // n_tiles, index % n_tiles
    logits_ptr = at_row(logits_ptr, row, inner, logits_stride_outer, logits_stride_inner, HAS_INNER)
    out_ptr = at_row(grad_logits_ptr, row, inner, grad_logits_stride_outer, grad_logits_stride_inner, HAS_INNER)
    target_ptr = at_row(target_ptr, row, inner, target_stride_outer, target_stride_inner, HAS_INNER)
    grad_loss_ptr = at_row(grad_loss_ptr, row, inner, grad_loss_stride_outer, grad_loss_stride_inner, HAS_INNER)
    target = tl.load(target_ptr).to(tl.int64)
    g = tl.load(grad_loss_ptr).to(tl.float32)
    m = tl.load(saved_ptr + row)
    d = tl.load(saved_ptr + saved_stride + row)

    # Positions count from the line in which the row begins: column i is at position shift + i.
    logits_ptr, shift = floor_to_line(logits_ptr)
    if OUT_ALIGNED:
        out_ptr, _ = floor_to_line(out_ptr)
    else:
        out_ptr -= shift
    end = shift + n_columns
    first = tile * TILE
    offs = first + tl.arange(0, TILE)
    lowest = ((shift + VEC - 1) // VEC) * VEC
    mask = (offs >= lowest) & (offs < (end // VEC) * VEC)

    g = tl.where((target >= 0) & (target < classes), g, float("nan"))
    scale, of_target, of_class = g / d, g * target_weight, g * class_weight
    column = tl.where((target >= start) & (target < start + real_columns), target - start, -1).to(tl.int32)
    if target == ignore_index:
        # Not even read: an ignored row may hold NaN or inf.
        grad = tl.zeros([TILE], dtype=tl.float32)
    else:
        z = tl.load(logits_ptr + offs, mask=mask, other=0.0)
        # One tile of a row holds the target, and few hold padding; the others need not look for them.
        has_target = (column + shift >= first) & (column + shift < first + TILE)
        if has_target | (first + TILE > shift + real_columns):
            grad = _gradient(z, offs - shift, m, scale, of_target, of_class, column, real_columns, True, HAS_SMOOTHING)
        else:
            grad = _gradient(z, offs - shift, m, scale, of_target, of_class, column, real_columns, False, HAS_SMOOTHING)
    tl.store(out_ptr + offs, grad.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_EDGES:  # noqa: SIM102 - known when compiling; the other is not
        if tile == 0:
            # Lanes [0, VEC) before the first whole vector, the others after the last one.
            lane = tl.arange(0, 2 * VEC)
            in_head = (lane < VEC) & (shift + lane < tl.minimum(lowest, end))
            after = tl.maximum((end // VEC) * VEC, lowest) + lane - VEC
            edge_offs = tl.where(in_head, shift + lane, after)
            edge = in_head | ((lane >= VEC) & (after < end))
            edge_z = tl.load(logits_ptr + edge_offs, mask=edge & (target != ignore_index), other=0.0)
            edge_grad = _gradient(
                edge_z, edge_offs - shift, m, scale, of_target, of_class, column, real_columns, True, HAS_SMOOTHING
            )
            edge_grad = tl.where(target == ignore_index, 0.0, edge_grad)
            tl.store(out_ptr + edge_offs, edge_grad.to(out_ptr.dtype.element_ty), mask=edge)
