"""Statistics of all shards to the loss: one read of [W, fields, N], merged in rank order on every rank alike."""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.statistics import LOG2_E

_UNSPECIALIZED = [
    "n_rows",
    "n_ranks",
    "rank_stride",
    "field_stride",
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
    gathered_ptr,  # [W, fields, N] float32
    target_ptr,  # [..] int64 or int32
    # outputs
    loss_ptr,  # [..] float32, contiguous
    saved_ptr,  # [2, N] float32: m, d of the whole row
    # sizes
    n_rows,  # rows of this launch
    n_ranks,  # W
    rank_stride,  # between ranks of gathered
    field_stride,  # between fields of gathered, and of saved
    inner,  # row i is (i // inner, i % inner)
    target_stride_outer,
    target_stride_inner,
    classes,  # V
    ignore_index,
    smoothing_weight,  # a'
    target_weight,  # 1 - a'
    # constants
    HAS_SMOOTHING: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = rows < n_rows
    # One pointer per field: stepping from field to field and from rank to rank never forms a 32-bit product.
    m_ptr = gathered_ptr + rows
    d_ptr = m_ptr + field_stride
    z_y_ptr = d_ptr + field_stride
    s_ptr = z_y_ptr + field_stride
    columns_ptr = s_ptr + field_stride

    # Idle lanes load what keeps them finite.
    m = tl.full([BLOCK_N], -float("inf"), dtype=tl.float32)
    z_y = tl.full([BLOCK_N], -float("inf"), dtype=tl.float32)
    max_ptr = m_ptr
    for _ in range(n_ranks):
        m = tl.maximum(m, tl.load(max_ptr, mask=mask_n, other=0.0))
        z_y = tl.maximum(z_y, tl.load(z_y_ptr, mask=mask_n, other=0.0))
        max_ptr += rank_stride
        z_y_ptr += rank_stride

    d = tl.zeros([BLOCK_N], dtype=tl.float32)
    s = tl.zeros([BLOCK_N], dtype=tl.float32)
    for _ in range(n_ranks):
        m_rank = tl.load(m_ptr, mask=mask_n, other=0.0)
        d += tl.exp2((m_rank - m) * LOG2_E) * tl.load(d_ptr, mask=mask_n, other=1.0)
        m_ptr += rank_stride
        d_ptr += rank_stride
        if HAS_SMOOTHING:
            columns = tl.load(columns_ptr, mask=mask_n, other=0.0)
            # An empty shard adds nothing: 0 columns times an infinite shift would be NaN.
            shift = tl.where(columns > 0.0, columns * (m_rank - m), 0.0)
            s += tl.load(s_ptr, mask=mask_n, other=0.0) + shift
            s_ptr += rank_stride
            columns_ptr += rank_stride

    log_d = tl.log(d)
    from_max = z_y - m
    loss = log_d - from_max
    if HAS_SMOOTHING:
        mean_part = log_d - tl.div_rn(s, classes * 1.0)
        loss = target_weight * loss + smoothing_weight * mean_part
        # Weights of both signs, or 0, would make NaN of a target that costs infinity.
        loss = tl.where((from_max == -float("inf")) & (d > 0.0), float("inf"), loss)
    target_rows = (rows // inner) * target_stride_outer + (rows % inner) * target_stride_inner
    target = tl.load(target_ptr + target_rows, mask=mask_n, other=0).to(tl.int64)
    loss = tl.where((target >= 0) & (target < classes), loss, float("nan"))
    loss = tl.where(target == ignore_index, 0.0, loss)
    tl.store(loss_ptr + rows, loss, mask=mask_n)
    tl.store(saved_ptr + rows, m, mask=mask_n)
    tl.store(saved_ptr + field_stride + rows, d, mask=mask_n)
