"""Statistics of all parts of all shards to the loss: one read, merged in the same order on every rank."""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.numerics import exp_weight, row_loss
from te_ce.kernels.rows import at_row

_UNSPECIALIZED = [
    "gathered_ptr",
    "target_ptr",
    "loss_ptr",
    "saved_ptr",
    "n_rows",
    "n_parts",
    "field_stride",
    "inner",
    "target_stride_outer",
    "target_stride_inner",
    "classes",
    "ignore_index",
    "smoothing_weight",
    "target_weight",
]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def merge_statistics_kernel(
    # inputs
    gathered_ptr,  # [parts, fields, N] float32
    target_ptr,  # [..] int64 or int32
    # outputs
    loss_ptr,  # [..] float32, contiguous
    saved_ptr,  # [2, N] float32: m, d of the whole row
    # sizes
    n_rows,  # rows of this launch
    n_parts,
    field_stride: tl.int64,  # N, between fields of gathered, and of saved
    inner,  # row i is (i // inner, i % inner)
    target_stride_outer: tl.int64,
    target_stride_inner: tl.int64,
    classes: tl.int64,  # V
    ignore_index: tl.int64,
    smoothing_weight: tl.float32,  # a'
    target_weight: tl.float32,  # 1 - a'
    # constants
    HAS_INNER: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = rows < n_rows
    # One pointer per field: stepping from field to field and from part to part never forms a 32-bit product.
    m_ptr = gathered_ptr + rows
    d_ptr = m_ptr + field_stride
    z_y_ptr = d_ptr + field_stride
    s_ptr = z_y_ptr + field_stride
    columns_ptr = s_ptr + field_stride
    part_stride = field_stride * 3
    if HAS_SMOOTHING:
        part_stride += field_stride * 2

    # Idle lanes load what keeps them finite.
    m = tl.full([BLOCK_N], -float("inf"), dtype=tl.float32)
    z_y = tl.full([BLOCK_N], -float("inf"), dtype=tl.float32)
    max_ptr = m_ptr
    for _ in range(n_parts):
        m = tl.maximum(m, tl.load(max_ptr, mask=mask_n, other=0.0))
        z_y = tl.maximum(z_y, tl.load(z_y_ptr, mask=mask_n, other=0.0))
        max_ptr += part_stride
        z_y_ptr += part_stride

    d = tl.zeros([BLOCK_N], dtype=tl.float32)
    s = tl.zeros([BLOCK_N], dtype=tl.float32)
    for _ in range(n_parts):
        m_part = tl.load(m_ptr, mask=mask_n, other=0.0)
        d += exp_weight(m_part - m) * tl.load(d_ptr, mask=mask_n, other=1.0)
        m_ptr += part_stride
        d_ptr += part_stride
        if HAS_SMOOTHING:
            columns = tl.load(columns_ptr, mask=mask_n, other=0.0)
            # An empty part adds nothing: 0 columns times an infinite shift would be NaN.
            shift = tl.where(columns > 0.0, columns * (m_part - m), 0.0)
            s += tl.load(s_ptr, mask=mask_n, other=0.0) + shift
            s_ptr += part_stride
            columns_ptr += part_stride

    target_ptrs = at_row(target_ptr, rows, inner, target_stride_outer, target_stride_inner, HAS_INNER)
    target = tl.load(target_ptrs, mask=mask_n, other=0).to(tl.int64)
    loss = row_loss(m, d, z_y, s, target, classes, ignore_index, smoothing_weight, target_weight, HAS_SMOOTHING)
    tl.store(loss_ptr + rows, loss, mask=mask_n)
    tl.store(saved_ptr + rows, m, mask=mask_n)
    tl.store(saved_ptr + field_stride + rows, d, mask=mask_n)
