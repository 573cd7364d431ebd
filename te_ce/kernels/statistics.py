"""Row statistics of one shard, in parts; and the loss itself where one program walks whole rows of the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.numerics import row_loss
from te_ce.kernels.rows import at_row
from te_ce.kernels.walk import span_statistics

_UNSPECIALIZED = [
    "logits_ptr",
    "target_ptr",
    "stats_ptr",
    "inner",
    "logits_stride_outer",
    "logits_stride_inner",
    "target_stride_outer",
    "target_stride_inner",
    "n_rows",
    "span_blocks",
    "start",
    "real_columns",
    "ignore_index",
]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def row_statistics_kernel(
    # inputs
    logits_ptr,  # [.., V_local] float32, bfloat16 or float16
    target_ptr,  # [..] int64 or int32
    # output
    stats_ptr,  # [PARTS, fields, N] float32: m, d, z_y, and with smoothing s, columns
    # sizes
    inner,  # row i is (i // inner, i % inner)
    logits_stride_outer: tl.int64,
    logits_stride_inner: tl.int64,
    target_stride_outer: tl.int64,
    target_stride_inner: tl.int64,
    n_rows: tl.int64,  # N, between fields of the statistics
    span_blocks,  # blocks of a part
    start: tl.int64,  # global id of column 0
    real_columns,  # K, columns at or past it are padding
    ignore_index: tl.int64,
    # constants
    HAS_INNER: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
):
    row, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    _, m, d, z_y, s, columns = span_statistics(
        at_row(logits_ptr, row, inner, logits_stride_outer, logits_stride_inner, HAS_INNER),
        at_row(target_ptr, row, inner, target_stride_outer, target_stride_inner, HAS_INNER),
        part,
        span_blocks,
        start,
        real_columns,
        ignore_index,
        HAS_SMOOTHING,
        HAS_EDGES,
        PARTS,
        UNROLL,
        THREADS,
    )
    FIELDS: tl.constexpr = 5 if HAS_SMOOTHING else 3
    out_ptr = stats_ptr + part * (FIELDS * n_rows) + row
    tl.store(out_ptr, m)
    tl.store(out_ptr + n_rows, d)
    tl.store(out_ptr + 2 * n_rows, z_y)
    if HAS_SMOOTHING:
        tl.store(out_ptr + 3 * n_rows, s)
        tl.store(out_ptr + 4 * n_rows, columns)


@triton.jit(do_not_specialize=[*_UNSPECIALIZED, "loss_ptr", "saved_ptr"])
def row_loss_kernel(
    # inputs
    logits_ptr,  # [.., V] float32, bfloat16 or float16: whole rows
    target_ptr,  # [..] int64 or int32
    # outputs
    loss_ptr,  # [N] float32
    saved_ptr,  # [2, N] float32: m, d
    # sizes
    inner,  # row i is (i // inner, i % inner)
    logits_stride_outer: tl.int64,
    logits_stride_inner: tl.int64,
    target_stride_outer: tl.int64,
    target_stride_inner: tl.int64,
    n_rows: tl.int64,  # N, between fields of what is saved
    span_blocks,  # blocks of a row
    start: tl.int64,  # 0
    real_columns,  # K = V
    ignore_index: tl.int64,
    smoothing_weight: tl.float32,  # a'
    target_weight: tl.float32,  # 1 - a'
    # constants
    HAS_INNER: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
):
    row = tl.program_id(0)
    target, m, d, z_y, s, _ = span_statistics(
        at_row(logits_ptr, row, inner, logits_stride_outer, logits_stride_inner, HAS_INNER),
        at_row(target_ptr, row, inner, target_stride_outer, target_stride_inner, HAS_INNER),
        0,
        span_blocks,
        start,
        real_columns,
        ignore_index,
        HAS_SMOOTHING,
        HAS_EDGES,
        1,
        UNROLL,
        THREADS,
    )
    loss = row_loss(m, d, z_y, s, target, real_columns, ignore_index, smoothing_weight, target_weight, HAS_SMOOTHING)
    tl.store(loss_ptr + row, loss)
    tl.store(saved_ptr + row, m)
    tl.store(saved_ptr + n_rows + row, d)
