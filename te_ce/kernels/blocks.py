"""Row statistics of blocks of columns whose bits depend on the block's logits alone.

Not on how wide the shard is that holds it, where its rows lie in memory, how many blocks or rows there are: every block
begins at the first thread, all of its columns are summed relative to their max in one way, and all of that is one
compiled code, since nothing of the above is a constant of the kernel. Whether a block can be loaded in whole vectors of
16 bytes is found while it runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.argmax import NO_COLUMN
from te_ce.kernels.entropy import weighed_logarithm
from te_ce.kernels.rows import at_row
from te_ce.kernels.statistics import UNSPECIALIZED, store_statistics
from te_ce.kernels.transform import masked_transform, split_scale
from te_ce.kernels.vectors import MINUS_INF_PAIR, as_float32, block_positions, load_block, sum_by_pairs
from te_ce.kernels.walk import SHIFTED_ONE, shifted_exp, sum_of_threads


@triton.jit
def _load_columns(
    pointer,  # of the block's first column
    count,  # columns that there are; none where negative
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,
):
    """As `load_block`, but of columns that begin and end anywhere in a vector."""
    if (pointer.to(tl.int64) % 16 == 0) & (count % VEC == 0):
        block = load_block(tl.multiple_of(pointer, 16), 0, count, UNROLL, THREADS, VEC)
    elif pointer.dtype.element_ty == tl.bfloat16:
        offs = 2 * block_positions(UNROLL, THREADS, VEC // 2)
        bits_ptr = pointer.to(tl.pointer_type(tl.int16))
        even = tl.load(bits_ptr + offs, mask=offs < count, other=MINUS_INF_PAIR >> 16).to(tl.int32)
        odd = tl.load(bits_ptr + offs + 1, mask=offs + 1 < count, other=MINUS_INF_PAIR >> 16).to(tl.int32)
        block = (odd << 16) | (even & 65535)
    else:
        offs = block_positions(UNROLL, THREADS, VEC)
        block = tl.load(pointer + offs, mask=offs < count, other=-float("inf"))
    return block


@triton.jit
def _block_statistics(
    block,
    count,  # of its columns, the first ones, that there are
    softcap,
    scale,
    HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,
):
    """m, d, s, t, and the position of the max, as scalars."""
    BLOCK: tl.constexpr = UNROLL * THREADS * VEC
    # Of an element within its thread, and where the thread begins: constants, and one number, instead of many numbers.
    offs_u, offs_v = tl.arange(0, UNROLL)[:, None, None], tl.arange(0, VEC)[None, None, :]
    offs = offs_u * (THREADS * VEC) + offs_v
    offs_t = tl.arange(0, THREADS) * VEC
    mask = offs < count - offs_t[None, :, None]
    u = masked_transform(as_float32(block, UNROLL, THREADS, VEC), mask, softcap, scale)
    m = tl.max(tl.max(tl.max(u, axis=2), axis=0), axis=0)
    x = u - tl.where(m == -float("inf"), 0.0, m)
    exp = shifted_exp(x, scale)
    d = sum_of_threads(sum_by_pairs(exp, UNROLL, THREADS, VEC) * (1.0 / SHIFTED_ONE))
    s = 0.0
    t = 0.0
    best = NO_COLUMN
    if HAS_SMOOTHING:
        s = tl.sum(sum_by_pairs(tl.where(mask, x, 0.0), UNROLL, THREADS, VEC), axis=0)
    if HAS_ENTROPY:
        t = tl.sum(sum_by_pairs(weighed_logarithm(x, exp, scale), UNROLL, THREADS, VEC), axis=0) * (1.0 / SHIFTED_ONE)
    if HAS_ARGMAX:
        # The threads' offsets come after the minimum, which they may not carry past NO_COLUMN.
        of_max = tl.min(tl.min(tl.where(u == m, offs, NO_COLUMN - BLOCK), axis=2), axis=0)
        best = tl.where(m == -float("inf"), 0, tl.min(of_max + offs_t, axis=0))
    return m, d, s, t, best


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "n_parts", "n_groups", "group_parts"])
def block_statistics_kernel(
    # inputs
    logits_ptr,  # [.., V_local] float32, bfloat16 or float16
    target_ptr,  # [..] int64 or int32
    # output
    stats_ptr,  # [n_parts, fields, N] float32: m, d, u_y, [s, columns], [t], [argmax, an int32]
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
    n_parts,  # blocks of a row; those past its columns are empty
    n_groups,  # programs of a row
    group_parts,  # blocks of a program
    start: tl.int64,  # global id of column 0
    real_columns,  # K, columns at or past it are padding
    ignore_index: tl.int64,
    softcap,  # None: no softcap
    scale,  # of all rows; None: 1, or `row_scale_ptr`
    scale_rest,  # what float32 leaves of it, or None
    # constants
    HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
):
    VEC: tl.constexpr = 16 // (logits_ptr.dtype.element_ty.primitive_bitwidth // 8)
    BLOCK: tl.constexpr = UNROLL * THREADS * VEC
    FIELDS: tl.constexpr = 3 + 2 * HAS_SMOOTHING + HAS_ENTROPY + HAS_ARGMAX
    row, group = tl.program_id(0) // n_groups, tl.program_id(0) % n_groups
    row_ptr = at_row(logits_ptr, row, inner, logits_stride_outer, logits_stride_inner, True)
    target = tl.load(at_row(target_ptr, row, inner, target_stride_outer, target_stride_inner, True)).to(tl.int64)
    if row_scale_ptr is not None:
        scale = tl.load(at_row(row_scale_ptr, row, inner, row_scale_stride_outer, row_scale_stride_inner, True))
    if scale is not None:
        scale = split_scale(scale, scale_rest)
    # Nothing is read of an ignored row, whose statistics nobody uses, unless the argmax is asked for.
    end = real_columns
    if not HAS_ARGMAX:
        end = tl.where(target == ignore_index, 0, real_columns)
    owned = (group == 0) & (target >= start) & (target < start + end)
    target_logit = tl.load(row_ptr + tl.where(owned, target - start, 0), mask=owned, other=-float("inf"))
    target_logit = masked_transform(target_logit.to(tl.float32), owned, softcap, scale)

    first = group * group_parts
    # One block ahead: while a block is summed up, the next one is on its way.
    row_ptr += first * BLOCK
    left = end - first * BLOCK
    block = _load_columns(row_ptr, tl.minimum(left, BLOCK), UNROLL, THREADS, VEC)
    for part in range(first, tl.minimum(first + group_parts, n_parts)):
        row_ptr += BLOCK
        next_block = _load_columns(row_ptr, tl.minimum(left - BLOCK, BLOCK), UNROLL, THREADS, VEC)
        count = tl.minimum(tl.maximum(left, 0), BLOCK)
        m, d, s, t, best = _block_statistics(
            block, count, softcap, scale, HAS_SMOOTHING, HAS_ENTROPY, HAS_ARGMAX, UNROLL, THREADS, VEC
        )
        u_y = tl.where(part == 0, target_logit, -float("inf"))
        argmax = tl.where(count > 0, start.to(tl.int32) + part * BLOCK + best, NO_COLUMN)
        out_ptr = stats_ptr + part * (FIELDS * n_rows) + row
        columns = count.to(tl.float32)
        store_statistics(out_ptr, n_rows, m, d, u_y, s, columns, t, argmax, HAS_SMOOTHING, HAS_ENTROPY, HAS_ARGMAX)
        block, left = next_block, left - BLOCK
