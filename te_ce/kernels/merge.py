"""Statistics of all parts of all shards to the loss: one read, merged in the same order on every rank."""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.argmax import NO_COLUMN
from te_ce.kernels.entropy import lower
from te_ce.kernels.numerics import exp_weight, row_loss
from te_ce.kernels.outputs import OUTPUT_POINTERS, store_outputs
from te_ce.kernels.rows import at_row
from te_ce.kernels.transform import of_z, split_scale

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
    "z_loss_weight",
    "row_scale_ptr",
    "row_scale_stride_outer",
    "row_scale_stride_inner",
    "scale",
    "scale_rest",
    *OUTPUT_POINTERS,
]


@triton.jit
def max_of_parts(m_ptr, u_y_ptr, part_stride, n_parts, mask, BLOCK_N: tl.constexpr):
    """m and u_y of whole rows, [BLOCK_N]; idle lanes load what keeps them finite, here and below."""
    m = tl.full([BLOCK_N], -float("inf"), dtype=tl.float32)
    u_y = tl.full([BLOCK_N], -float("inf"), dtype=tl.float32)
    for _ in range(n_parts):
        m = tl.maximum(m, tl.load(m_ptr, mask=mask, other=0.0))
        u_y = tl.maximum(u_y, tl.load(u_y_ptr, mask=mask, other=0.0))
        m_ptr += part_stride
        u_y_ptr += part_stride
    return m, u_y


@triton.jit
def sums_of_parts(
    m,  # [BLOCK_N] of the whole rows
    m_ptr,
    field_stride,
    part_stride,
    n_parts,
    mask,
    scale,  # see `split_scale`; None: 1
    HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """d, s, t and argmax of whole rows, [BLOCK_N]. A part without columns changes no bit."""
    # Blocks are many: in float32 every one could round the sum of a confident row to the same side.
    SUM: tl.constexpr = tl.float64 if IN_BLOCKS else tl.float32
    # One pointer per field: stepping from field to field and from part to part never forms a 32-bit product.
    d_ptr = m_ptr + field_stride
    s_ptr = d_ptr + 2 * field_stride
    columns_ptr = s_ptr + field_stride
    t_ptr = s_ptr
    if HAS_SMOOTHING:
        t_ptr = columns_ptr + field_stride
    argmax_ptr = t_ptr
    if HAS_ENTROPY:
        argmax_ptr = t_ptr + field_stride
    argmax_ptr = argmax_ptr.to(tl.pointer_type(tl.int32))
    d = tl.zeros([BLOCK_N], dtype=SUM)
    s = tl.zeros([BLOCK_N], dtype=SUM)
    t = tl.zeros([BLOCK_N], dtype=SUM)
    argmax = tl.full([BLOCK_N], NO_COLUMN, dtype=tl.int32)
    for _ in range(n_parts):
        m_part = tl.load(m_ptr, mask=mask, other=0.0)
        weight = exp_weight(m_part - m, scale).to(SUM)
        d_part = tl.load(d_ptr, mask=mask, other=1.0).to(SUM)
        d += weight * d_part
        m_ptr += part_stride
        d_ptr += part_stride
        if HAS_SMOOTHING:
            columns = tl.load(columns_ptr, mask=mask, other=0.0)
            # An empty part adds nothing: 0 columns times an infinite shift would be NaN.
            shift = tl.where(columns > 0.0, columns * (m_part - m), 0.0)
            s += tl.load(s_ptr, mask=mask, other=0.0).to(SUM) + shift
            s_ptr += part_stride
            columns_ptr += part_stride
        if HAS_ENTROPY:
            t += weight * lower(tl.load(t_ptr, mask=mask, other=0.0).to(SUM), d_part, m_part - m, scale)
            t_ptr += part_stride
        if HAS_ARGMAX:
            column = tl.load(argmax_ptr, mask=mask, other=0)
            argmax = tl.minimum(argmax, tl.where(m_part == m, column, NO_COLUMN))
            argmax_ptr += part_stride
    return d.to(tl.float32), s.to(tl.float32), t.to(tl.float32), argmax


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def merge_statistics_kernel(
    # inputs
    gathered_ptr,  # [parts, fields, N] float32
    target_ptr,  # [..] int64 or int32
    # outputs
    loss_ptr,  # [..] float32, contiguous
    saved_ptr,  # [2 or 3, N] float32: m, d, [t] of the whole row
    # of some calls, else None
    row_scale_ptr,  # [..] float32
    log_probs_ptr,  # [..] float32, contiguous, as the next three
    entropy_ptr,
    lse_ptr,
    z_loss_ptr,
    predictions_ptr,  # [..] int64, contiguous
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
    z_loss_weight,  # w; None: 0
    row_scale_stride_outer: tl.int64,
    row_scale_stride_inner: tl.int64,
    scale,  # of all rows; None: 1, or `row_scale_ptr`
    scale_rest,  # what float32 leaves of it, or None
    # constants
    HAS_INNER: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = rows < n_rows
    m_ptr = gathered_ptr + rows
    if row_scale_ptr is not None:
        row_scale_ptrs = at_row(row_scale_ptr, rows, inner, row_scale_stride_outer, row_scale_stride_inner, HAS_INNER)
        scale = tl.load(row_scale_ptrs, mask=mask_n, other=1.0)
    if scale is not None:
        scale = split_scale(scale, scale_rest)
    FIELDS: tl.constexpr = 3 + 2 * HAS_SMOOTHING + HAS_ENTROPY + HAS_ARGMAX
    part_stride = field_stride * FIELDS
    m, u_y = max_of_parts(m_ptr, m_ptr + 2 * field_stride, part_stride, n_parts, mask_n, BLOCK_N)
    d, s, t, argmax = sums_of_parts(
        m,
        m_ptr,
        field_stride,
        part_stride,
        n_parts,
        mask_n,
        scale,
        HAS_SMOOTHING,
        HAS_ENTROPY,
        HAS_ARGMAX,
        IN_BLOCKS,
        BLOCK_N,
    )
    target_ptrs = at_row(target_ptr, rows, inner, target_stride_outer, target_stride_inner, HAS_INNER)
    target = tl.load(target_ptrs, mask=mask_n, other=0).to(tl.int64)
    weights = (smoothing_weight, target_weight, z_loss_weight)
    max_z, from_max, s, t = of_z(m, u_y, s, t, scale)
    loss = row_loss(max_z, from_max, d, s, target, classes, ignore_index, weights, HAS_SMOOTHING)
    tl.store(loss_ptr + rows, loss, mask=mask_n)
    tl.store(saved_ptr + rows, m, mask=mask_n)
    tl.store(saved_ptr + field_stride + rows, d, mask=mask_n)
    if HAS_ENTROPY:
        tl.store(saved_ptr + 2 * field_stride + rows, t, mask=mask_n)
    pointers = log_probs_ptr, entropy_ptr, lse_ptr, z_loss_ptr, predictions_ptr
    store_outputs(pointers, rows, mask_n, max_z, from_max, d, t, argmax, target, classes, ignore_index, z_loss_weight)
