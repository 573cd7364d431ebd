"""Gradient of the logits, recomputed from the row statistics: one read, one write, one rounding.

A program owns one tile of one row, so reading and overwriting the same storage is safe: nothing else touches the tile.
The p_y - 1 of the target is formed in float32 before the store; forming it from a rounded p_y loses it as p_y -> 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.statistics import LOG2_E

_UNSPECIALIZED = [
    "target_stride_outer",
    "target_stride_inner",
    "grad_loss_stride_outer",
    "grad_loss_stride_inner",
    "saved_stride",
    "start",
    "real_columns",
    "classes",
    "ignore_index",
    "target_weight",
    "class_weight",
]


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
    logits_stride_outer,
    logits_stride_inner,
    target_stride_outer,
    target_stride_inner,
    grad_loss_stride_outer,
    grad_loss_stride_inner,
    grad_logits_stride_outer,
    grad_logits_stride_inner,
    saved_stride,  # between fields
    n_columns,  # V_local
    n_tiles,  # tiles per row
    start,  # global id of column 0
    real_columns,  # K, columns at or past it are padding
    classes,  # V
    ignore_index,
    target_weight,  # 1 - a'
    class_weight,  # a'/V
    # constants
    HAS_SMOOTHING: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    tile = tl.program_id(0)
    row = (tile // n_tiles).to(tl.int64)
    offs_v = (tile % n_tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < n_columns
    outer_row, inner_row = row // inner, row % inner
    out_ptr = grad_logits_ptr + outer_row * grad_logits_stride_outer + inner_row * grad_logits_stride_inner
    target = tl.load(target_ptr + outer_row * target_stride_outer + inner_row * target_stride_inner).to(tl.int64)

    if target == ignore_index:
        # Not even read: an ignored row may hold NaN or inf.
        grad = tl.zeros([BLOCK_V], dtype=tl.float32)
    else:
        g_ptr = grad_loss_ptr + outer_row * grad_loss_stride_outer + inner_row * grad_loss_stride_inner
        g = tl.load(g_ptr).to(tl.float32)
        g = tl.where((target >= 0) & (target < classes), g, float("nan"))
        m = tl.load(saved_ptr + row)
        d = tl.load(saved_ptr + saved_stride + row)
        row_ptr = logits_ptr + outer_row * logits_stride_outer + inner_row * logits_stride_inner
        z = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
        grad = tl.exp2((z - m) * LOG2_E) * tl.div_rn(g, d)
        if HAS_SMOOTHING:
            grad -= g * class_weight
        column = target - start
        grad = tl.where(offs_v == column, grad - g * target_weight, grad)
        grad = tl.where(offs_v < real_columns, grad, 0.0)
    tl.store(out_ptr + offs_v, grad.to(grad_logits_ptr.dtype.element_ty), mask=mask_v, cache_modifier=".cs")
