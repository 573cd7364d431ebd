"""Gradient of the logits, recomputed from the row statistics: one read, one write, one rounding.

A program owns one tile of one row, so reading and overwriting the same storage is safe: nothing else touches the tile.
The p_y - 1 of the target is formed in float32 before the store; forming it from a rounded p_y loses it as p_y -> 1.

Tiles are cut at lines of memory, not at columns: loads and stores are of whole vectors of 16 bytes. The columns
before the first and after the last whole vector of a row (odd vocabularies) are done one by one by its first program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.coefficients import CLASS, LOG, SCALE, TARGET, element_gradient, row_coefficients
from te_ce.kernels.rows import at_row, floor_to_line

_UNSPECIALIZED = [
    "logits_ptr",
    "target_ptr",
    "grad_loss_ptr",
    "grad_log_probs_ptr",
    "grad_entropy_ptr",
    "grad_lse_ptr",
    "row_scale_ptr",
    "saved_ptr",
    "grad_logits_ptr",
    "inner",
    "logits_stride_outer",
    "logits_stride_inner",
    "target_stride_outer",
    "target_stride_inner",
    "grad_loss_stride_outer",
    "grad_loss_stride_inner",
    "grad_log_probs_stride_outer",
    "grad_log_probs_stride_inner",
    "grad_entropy_stride_outer",
    "grad_entropy_stride_inner",
    "grad_lse_stride_outer",
    "grad_lse_stride_inner",
    "row_scale_stride_outer",
    "row_scale_stride_inner",
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
    "lse_weight",
    "softcap",
    "scale",
]


@triton.jit
def _store_edges(
    logits_ptr,
    out_ptr,
    shift,
    lowest,  # position of the first whole vector
    end,
    is_ignored,
    of_row,
    softcap,
    target_column,
    real_columns,
    PRESENT: tl.constexpr,  # sum of LOG, TARGET, CLASS, SCALE
):
    """Lanes [0, VEC) before the first whole vector of a row, the others after the last one."""
    VEC: tl.constexpr = 16 // (logits_ptr.dtype.element_ty.primitive_bitwidth // 8)
    lane = tl.arange(0, 2 * VEC)
    in_head = (lane < VEC) & (shift + lane < tl.minimum(lowest, end))
    after = tl.maximum((end // VEC) * VEC, lowest) + lane - VEC
    offs = tl.where(in_head, shift + lane, after)
    mask = in_head | ((lane >= VEC) & (after < end))
    x = tl.load(logits_ptr + offs, mask=mask & (is_ignored == 0), other=0.0)
    edges = element_gradient(x, offs - shift, of_row, softcap, target_column, real_columns, True, PRESENT)
    edges = tl.where(is_ignored, 0.0, edges)
    tl.store(out_ptr + offs, edges.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def logits_gradient_kernel(
    # inputs
    logits_ptr,  # [.., V_local] float32, bfloat16 or float16
    target_ptr,  # [..] int64 or int32
    grad_loss_ptr,  # [..] float32 or None, as the next four
    grad_log_probs_ptr,
    grad_entropy_ptr,
    grad_lse_ptr,
    row_scale_ptr,
    saved_ptr,  # [2 or 3, N] float32: m, d, [t] of the whole row
    # output
    grad_logits_ptr,  # [.., V_local], dtype of the logits; may be logits_ptr
    # sizes
    inner,  # row i is (i // inner, i % inner)
    logits_stride_outer: tl.int64,
    logits_stride_inner: tl.int64,
    grad_logits_stride_outer: tl.int64,
    grad_logits_stride_inner: tl.int64,
    target_stride_outer: tl.int64,
    target_stride_inner: tl.int64,
    grad_loss_stride_outer: tl.int64,
    grad_loss_stride_inner: tl.int64,
    grad_log_probs_stride_outer: tl.int64,
    grad_log_probs_stride_inner: tl.int64,
    grad_entropy_stride_outer: tl.int64,
    grad_entropy_stride_inner: tl.int64,
    grad_lse_stride_outer: tl.int64,
    grad_lse_stride_inner: tl.int64,
    row_scale_stride_outer: tl.int64,
    row_scale_stride_inner: tl.int64,
    saved_stride: tl.int64,  # between fields
    n_columns,  # V_local
    n_tiles,  # tiles per row
    start: tl.int64,  # global id of column 0
    real_columns,  # K, columns at or past it are padding
    classes: tl.int64,  # V
    ignore_index: tl.int64,
    target_weight,  # 1 - a', float32; the next four may be None
    class_weight,  # a'/V
    lse_weight,  # 2 w
    softcap,
    scale,
    # constants
    HAS_INNER: tl.constexpr,
    HAS_EDGES: tl.constexpr,  # rows begin or end inside a vector
    OUT_ALIGNED: tl.constexpr,  # a row of the gradient begins at the same place in a vector as one of the logits
    TILE: tl.constexpr,
):
    VEC: tl.constexpr = 16 // (logits_ptr.dtype.element_ty.primitive_bitwidth // 8)
    # From the end: what forward read last may still lie in the cache, and who reads the gradient begins at its start.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, tile = index // n_tiles, index % n_tiles
    logits_ptr = at_row(logits_ptr, row, inner, logits_stride_outer, logits_stride_inner, HAS_INNER)
    out_ptr = at_row(grad_logits_ptr, row, inner, grad_logits_stride_outer, grad_logits_stride_inner, HAS_INNER)
    target = tl.load(at_row(target_ptr, row, inner, target_stride_outer, target_stride_inner, HAS_INNER)).to(tl.int64)
    upstream = (
        (grad_loss_ptr, grad_loss_stride_outer, grad_loss_stride_inner),
        (grad_log_probs_ptr, grad_log_probs_stride_outer, grad_log_probs_stride_inner),
        (grad_entropy_ptr, grad_entropy_stride_outer, grad_entropy_stride_inner),
        (grad_lse_ptr, grad_lse_stride_outer, grad_lse_stride_inner),
    )
    row_scale = (row_scale_ptr, row_scale_stride_outer, row_scale_stride_inner)
    weights = (target_weight, class_weight, lse_weight)
    PRESENT: tl.constexpr = (
        LOG * (grad_entropy_ptr is not None)
        + TARGET * ((grad_loss_ptr is not None) or (grad_log_probs_ptr is not None))
        + CLASS * ((grad_loss_ptr is not None) and (class_weight is not None))
        + SCALE * ((row_scale_ptr is not None) or (scale is not None))
    )
    is_class = (target >= 0) & (target < classes)
    of_row = row_coefficients(
        row, inner, is_class, upstream, row_scale, weights, scale, saved_ptr, saved_stride, HAS_INNER
    )
    # Positions count from the line in which the row begins: column i is at position shift + i.
    logits_ptr, shift = floor_to_line(logits_ptr)
    out_ptr = floor_to_line(out_ptr)[0] if OUT_ALIGNED else out_ptr - shift
    end, first = shift + n_columns, tile * TILE
    offs = first + tl.arange(0, TILE)
    lowest = ((shift + VEC - 1) // VEC) * VEC
    mask = (offs >= lowest) & (offs < (end // VEC) * VEC)
    at = tl.where((target >= start) & (target < start + real_columns), target - start, -1).to(tl.int32)
    # Not even read: an ignored row may hold NaN or inf.
    if target == ignore_index:
        grad = tl.zeros([TILE], dtype=tl.float32)
    else:
        x = tl.load(logits_ptr + offs, mask=mask, other=0.0)
        # One tile of a row holds the target, and few hold padding; the others need not look for them.
        has_target = (at + shift >= first) & (at + shift < first + TILE)
        if has_target | (first + TILE > shift + real_columns):
            grad = element_gradient(x, offs - shift, of_row, softcap, at, real_columns, True, PRESENT)
        else:
            grad = element_gradient(x, offs - shift, of_row, softcap, at, real_columns, False, PRESENT)
    tl.store(out_ptr + offs, grad.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_EDGES:  # noqa: SIM102 - known when compiling; the other is not
        if tile == 0:
            is_ignored = target == ignore_index
            _store_edges(
                logits_ptr, out_ptr, shift, lowest, end, is_ignored, of_row, softcap, at, real_columns, PRESENT
            )
