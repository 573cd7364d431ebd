"""Row statistics of one shard: a program walks one row once, block by block.

The running max is shared by the block, the sums are kept per lane and added up after the last block: one reduction
across threads per block. When the max rises, the lanes are rescaled. The sum of a confident row is the 1 of its max and
many small terms, which rounding at 1 would lose to one side: lanes are summed with compensation (Kahan 1965), and their
total is split into a part that adds up exactly and a small rest. Every term of s is <= 0, so nothing cancels.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

# Adding and subtracting 1.5 * 2^17 rounds a float32 to a multiple of 2^-6; such multiples add up exactly to 2^18.
SPLIT = tl.constexpr(196608.0)


# Values that change from rank to rank or call to call, and whose divisibility helps no access.
_UNSPECIALIZED = ["target_stride_outer", "target_stride_inner", "stats_stride", "start", "real_columns"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def row_statistics_kernel(
    # inputs
    logits_ptr,  # [.., V_local] float32, bfloat16 or float16
    target_ptr,  # [..] int64 or int32
    # output
    stats_ptr,  # [fields, N] float32: m, d, z_y, and with smoothing s, columns
    # sizes
    inner,  # row i is (i // inner, i % inner)
    logits_stride_outer,
    logits_stride_inner,
    target_stride_outer,
    target_stride_inner,
    stats_stride,  # between fields
    n_columns,  # V_local
    start,  # global id of column 0
    real_columns,  # K, columns at or past it are padding
    # constants
    HAS_SMOOTHING: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outer_row, inner_row = row // inner, row % inner
    row_ptr = logits_ptr + outer_row * logits_stride_outer + inner_row * logits_stride_inner
    offs_v = tl.arange(0, BLOCK_V)

    m = -float("inf")
    lane_d = tl.zeros([BLOCK_V], dtype=tl.float32)
    lane_lost = tl.zeros([BLOCK_V], dtype=tl.float32)  # what lane_d holds too much
    lane_s = tl.zeros([BLOCK_V], dtype=tl.float32)
    blocks_before = 0.0
    for first in range(0, real_columns, BLOCK_V):
        # Bounded by the stored width, which keeps the loads wide; padding columns are masked after that.
        mask_v = first + offs_v < real_columns
        z = tl.load(row_ptr + first + offs_v, mask=first + offs_v < n_columns, other=-float("inf")).to(tl.float32)
        if HAS_PADDING:
            z = tl.where(mask_v, z, -float("inf"))
        new_m = tl.maximum(m, tl.max(z, axis=0))
        # While every logit so far is -inf there is no max to subtract: -inf - -inf would be NaN.
        base = tl.where(new_m == -float("inf"), 0.0, new_m)
        rescale = tl.exp2((m - base) * LOG2_E)
        lane_d *= rescale
        term = tl.exp2((z - base) * LOG2_E) - lane_lost * rescale
        raised = lane_d + term
        lane_lost = (raised - lane_d) - term
        lane_d = raised
        if HAS_SMOOTHING:
            # Lanes before this block are full: each holds one term per block, all of which move with the max.
            shift = tl.where(m == -float("inf"), 0.0, blocks_before * (m - base))
            lane_s += shift + tl.where(mask_v, z - base, 0.0)
            blocks_before += 1.0
        m = new_m

    target = tl.load(target_ptr + outer_row * target_stride_outer + inner_row * target_stride_inner).to(tl.int64)
    owned = (target >= start) & (target < start + real_columns)
    column = tl.where(owned, target, start) - start
    z_y = tl.load(row_ptr + column, mask=owned, other=-float("inf")).to(tl.float32)

    out_ptr = stats_ptr + row
    tl.store(out_ptr, m)
    out_ptr += stats_stride
    coarse = (lane_d + SPLIT) - SPLIT
    tl.store(out_ptr, tl.sum(coarse, axis=0) + tl.sum((lane_d - coarse) - lane_lost, axis=0))
    out_ptr += stats_stride
    tl.store(out_ptr, z_y)
    if HAS_SMOOTHING:
        out_ptr += stats_stride
        tl.store(out_ptr, tl.sum(lane_s, axis=0))
        out_ptr += stats_stride
        tl.store(out_ptr, real_columns * 1.0)
