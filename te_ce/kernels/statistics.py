"""Row statistics of one shard, in parts; and the loss itself where one program walks whole rows of the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.numerics import row_loss
from te_ce.kernels.outputs import OUTPUT_POINTERS, store_outputs
from te_ce.kernels.rows import at_row
from te_ce.kernels.transform import of_z, split_scale
from te_ce.kernels.walk import span_statistics

UNSPECIALIZED = [
    "logits_ptr",
    "target_ptr",
    "row_scale_ptr",
    "inner",
    "logits_stride_outer",
    "logits_stride_inner",
    "target_stride_outer",
    "target_stride_inner",
    "row_scale_stride_outer",
    "row_scale_stride_inner",
    "n_rows",
    "span_blocks",
    "start",
    "real_columns",
    "ignore_index",
    "softcap",
    "scale",
    "scale_rest",
]


@triton.jit
def store_statistics(
    out_ptr,  # of m
    n_rows,  # between fields
    m,
    d,
    u_y,
    s,
    columns,
    t,
    argmax,  # int32
    HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    mask=None,  # of rows
):
    """The fields that the problem has, in their order."""
    tl.store(out_ptr, m, mask=mask)
    tl.store(out_ptr + n_rows, d, mask=mask)
    tl.store(out_ptr + 2 * n_rows, u_y, mask=mask)
    if HAS_SMOOTHING:
        tl.store(out_ptr + 3 * n_rows, s, mask=mask)
        tl.store(out_ptr + 4 * n_rows, columns, mask=mask)
        out_ptr += 2 * n_rows
    if HAS_ENTROPY:
        tl.store(out_ptr + 3 * n_rows, t, mask=mask)
        out_ptr += n_rows
    if HAS_ARGMAX:
        tl.store((out_ptr + 3 * n_rows).to(tl.pointer_type(tl.int32)), argmax, mask=mask)


@triton.jit(do_not_specialize=["stats_ptr", *UNSPECIALIZED])
def row_statistics_kernel(
    # inputs
    logits_ptr,  # [.., V_local] float32, bfloat16 or float16
    target_ptr,  # [..] int64 or int32
    # output
    stats_ptr,  # [PARTS, fields, N] float32: m, d, u_y, [s, columns], [t], [argmax, an int32]
    # of some calls, else None
    row_scale_ptr,  # [..] float32
    # sizes
    inner,  # row i is (i // inner, i % inner)
    logits_stride_outer: tl.int64,
    logits_stride_inner: tl.int64,
    target_stride_outer: tl.int64,
    target_stride_inner: tl.int64,
    row_scale_stride_outer: tl.int64,
    row_scale_stride_inner: tl.int64,
    n_rows: tl.int64,  # N, between fields of the statistics
    span_blocks,  # blocks of a part
    start: tl.int64,  # global id of column 0
    real_columns,  # K, columns at or past it are padding
    ignore_index: tl.int64,
    softcap,  # None: no softcap
    scale,  # of all rows; None: 1, or `row_scale_ptr`
    scale_rest,  # what float32 leaves of it, or None
    # constants
    HAS_INNER: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
):
    row, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    if row_scale_ptr is not None:
        scale = tl.load(at_row(row_scale_ptr, row, inner, row_scale_stride_outer, row_scale_stride_inner, HAS_INNER))
    if scale is not None:
        scale = split_scale(scale, scale_rest)
    _, m, d, u_y, s, columns, t, argmax = span_statistics(
        at_row(logits_ptr, row, inner, logits_stride_outer, logits_stride_inner, HAS_INNER),
        at_row(target_ptr, row, inner, target_stride_outer, target_stride_inner, HAS_INNER),
        part,
        span_blocks,
        start,
        real_columns,
        ignore_index,
        softcap,
        scale,
        HAS_SMOOTHING,
        HAS_ENTROPY,
        HAS_ARGMAX,
        HAS_EDGES,
        PARTS,
        UNROLL,
        THREADS,
    )
    FIELDS: tl.constexpr = 3 + 2 * HAS_SMOOTHING + HAS_ENTROPY + HAS_ARGMAX
    out_ptr = stats_ptr + part * (FIELDS * n_rows) + row
    store_statistics(out_ptr, n_rows, m, d, u_y, s, columns, t, argmax, HAS_SMOOTHING, HAS_ENTROPY, HAS_ARGMAX)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "loss_ptr", "saved_ptr", "z_loss_weight", *OUTPUT_POINTERS])
def row_loss_kernel(
    # inputs
    logits_ptr,  # [.., V] float32, bfloat16 or float16: whole rows
    target_ptr,  # [..] int64 or int32
    # outputs
    loss_ptr,  # [N] float32
    saved_ptr,  # [2 or 3, N] float32: m, d, [t]
    # of some calls, else None
    row_scale_ptr,  # [..] float32
    log_probs_ptr,  # [N] float32, as the next three
    entropy_ptr,
    lse_ptr,
    z_loss_ptr,
    predictions_ptr,  # [N] int64
    # sizes
    inner,  # row i is (i // inner, i % inner)
    logits_stride_outer: tl.int64,
    logits_stride_inner: tl.int64,
    target_stride_outer: tl.int64,
    target_stride_inner: tl.int64,
    row_scale_stride_outer: tl.int64,
    row_scale_stride_inner: tl.int64,
    n_rows: tl.int64,  # N, between fields of what is saved
    span_blocks,  # blocks of a row
    start: tl.int64,  # 0
    real_columns,  # K = V
    ignore_index: tl.int64,
    softcap,  # None: no softcap
    scale,  # of all rows; None: 1, or `row_scale_ptr`
    scale_rest,  # what float32 leaves of it, or None
    smoothing_weight: tl.float32,  # a'
    target_weight: tl.float32,  # 1 - a'
    z_loss_weight,  # w; None: 0
    # constants
    HAS_INNER: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
):
    row = tl.program_id(0)
    if row_scale_ptr is not None:
        scale = tl.load(at_row(row_scale_ptr, row, inner, row_scale_stride_outer, row_scale_stride_inner, HAS_INNER))
    if scale is not None:
        scale = split_scale(scale, scale_rest)
    target, m, d, u_y, s, _, t, argmax = span_statistics(
        at_row(logits_ptr, row, inner, logits_stride_outer, logits_stride_inner, HAS_INNER),
        at_row(target_ptr, row, inner, target_stride_outer, target_stride_inner, HAS_INNER),
        0,
        span_blocks,
        start,
        real_columns,
        ignore_index,
        softcap,
        scale,
        HAS_SMOOTHING,
        HAS_ENTROPY,
        HAS_ARGMAX,
        HAS_EDGES,
        1,
        UNROLL,
        THREADS,
    )
    weights = (smoothing_weight, target_weight, z_loss_weight)
    max_z, from_max, s, t = of_z(m, u_y, s, t, scale)
    loss = row_loss(max_z, from_max, d, s, target, real_columns, ignore_index, weights, HAS_SMOOTHING)
    tl.store(loss_ptr + row, loss)
    tl.store(saved_ptr + row, m)
    tl.store(saved_ptr + n_rows + row, d)
    if HAS_ENTROPY:
        tl.store(saved_ptr + 2 * n_rows + row, t)
    pointers = log_probs_ptr, entropy_ptr, lse_ptr, z_loss_ptr, predictions_ptr
    store_outputs(pointers, row, None, max_z, from_max, d, t, argmax, target, real_columns, ignore_index, z_loss_weight)
