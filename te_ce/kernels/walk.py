"""The walk of a program over a span of one row: read once, block by block, into the statistics of the span.

Every thread keeps statistics of its own columns, so that no two threads meet before the last block: its max m, a
reference r that the max may exceed by SLACK before it follows, and the sum of exp(z - r). Following seldom keeps the
rounding of a rescaling out of the sum: each one that happens weighs what was summed before by less than exp(-SLACK).
Under a scale all of it is kept in u, z = a u, see `transform`.

The sum of a confident row is the 1 of its max and many small terms, which rounding at 1 would lose to one side: blocks
are summed by pairs, and added up with compensation (Kahan 1965). At the end the sum is divided by the max's own term,
so that the max counts exactly 1; then the threads' sums are split into a part that adds up exactly and a small rest.

Loads are of whole vectors of 16 bytes. The columns before the first and after the last whole vector (odd vocabularies)
are loaded one by one, and become the first columns of the threads. Which columns a thread sums depends on the address
of the row modulo 16 bytes and on nothing else: cut at lines of 128 bytes, rows of 50264 would sum otherwise in another
batch.

What only some calls ask for is summed beside: `entropy`, `argmax`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.argmax import NO_COLUMN, column_of_max
from te_ce.kernels.entropy import lower, sum_relative_to, weighed_logarithm
from te_ce.kernels.numerics import LOG2_E, exp_weight
from te_ce.kernels.rows import ceil_to_vector
from te_ce.kernels.transform import masked_transform
from te_ce.kernels.vectors import as_float32, block_positions, load_block, sum_by_pairs

# How far, in natural units, a thread's max may exceed its reference.
SLACK = tl.constexpr(0.5)

# Exponents carry this much more: a float32 exponent in [-8, 0] is half as exact as one in [-4, 4].
SHIFT = tl.constexpr(4.0)
SHIFTED_ONE = tl.constexpr(16.0)

# Adding and subtracting 1.5 * 2^17 rounds a float32 to a multiple of 2^-6; such multiples add up exactly to 2^18.
SPLIT = tl.constexpr(196608.0)


@triton.jit
def shifted_exp(x, scale):
    """exp(a x) * 2^SHIFT; the same for equal x, wherever it is called."""
    if scale is None:
        exponent = x * LOG2_E + SHIFT
    else:
        _, _, high, low, _ = scale
        exponent = x * high + (x * low + SHIFT)
    return tl.exp2(exponent)


@triton.jit
def _rescaling(x, scale):
    """exp(a x)"""
    if scale is not None:
        x *= scale[1].to(tl.float32)
    return tl.exp2(x * LOG2_E)


@triton.jit
def sum_of_threads(d):
    """[THREADS] -> sum, each of [0, 2^11]: none of the small ones is lost beside the 1 of the max."""
    coarse = (d + SPLIT) - SPLIT
    return tl.sum(coarse, axis=0) + tl.sum(d - coarse, axis=0)


@triton.jit
def _add_block(
    block,  # -inf where `mask` is off
    mask,
    at,  # its position
    state,  # of [THREADS] each, see `_begin`
    softcap,
    scale,
    FULL: tl.constexpr,  # the mask is on everywhere
    HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,
):
    """Statistics of the threads' columns so far, and of one more block of them."""
    m, r, d, lost, s, n, t, t_lost, best, best_at = state
    u = masked_transform(as_float32(block, UNROLL, THREADS, VEC), mask, softcap, scale)
    block_m = tl.max(tl.max(u, axis=2), axis=0)
    new_m = tl.maximum(m, block_m)
    if HAS_ARGMAX:
        best_at = tl.where(block_m > best, at, best_at)
        best = tl.maximum(best, block_m)
    new_r = tl.where(new_m > r + (SLACK if scale is None else SLACK * scale[4]), new_m, r)
    # While every logit so far is -inf there is no max to subtract: -inf - -inf would be NaN.
    base = tl.where(new_r == -float("inf"), 0.0, new_r)
    rescale = _rescaling(r - base, scale)
    x = u - base[None, :, None]
    exp = shifted_exp(x, scale)
    term = sum_by_pairs(exp, UNROLL, THREADS, VEC) - lost * rescale
    if HAS_ENTROPY:
        t_term = sum_by_pairs(weighed_logarithm(x, exp, scale), UNROLL, THREADS, VEC) - t_lost * rescale
        lowered = lower(t, d, r - base, scale) * rescale
        t = lowered + t_term
        t_lost = (t - lowered) - t_term
    d = d * rescale
    raised = d + term
    lost = (raised - d) - term
    if HAS_SMOOTHING:
        # With r = -inf either there were no columns, or s is -inf already.
        s += tl.where(r == -float("inf"), 0.0, r - base) * n
        s += sum_by_pairs(x if FULL else tl.where(mask, x, 0.0), UNROLL, THREADS, VEC)
    if FULL:
        n += UNROLL * VEC
    return new_m, new_r, raised, lost, s, n, t, t_lost, best, best_at


@triton.jit
def _begin(m, n, first, scale):
    """Statistics of threads that have one column or none, as they are carried from block to block."""
    x = m - tl.where(m == -float("inf"), 0.0, m)
    zero = tl.zeros_like(m)
    return (
        m,  # max
        m,  # r
        shifted_exp(x, scale),  # d
        zero,  # what d holds too much
        tl.where(n > 0.0, x, 0.0),  # s
        n,  # columns; the last block's are not counted
        zero,  # t
        zero,  # what t holds too much
        zero - float("inf"),  # max but for the edges
        tl.zeros_like(m).to(tl.int32) + first,  # position of the block in which it was first met
    )


@triton.jit
def _load_edges(
    row_ptr,
    head,  # columns before the body
    body,  # columns of the body
    real_columns,
    is_last,  # part of a row
    softcap,
    scale,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,
):
    """The columns outside of whole vectors, one a thread: u, which threads have one, which column it is."""
    lane = tl.arange(0, THREADS)
    after = head + body + lane - VEC
    in_head = (lane < head) & (lane < real_columns)
    in_tail = (lane >= VEC) & (after < real_columns)
    edge = is_last & (in_head | in_tail)
    column = tl.where(in_head, lane, after)
    x = tl.load(row_ptr + column, mask=edge, other=-float("inf")).to(tl.float32)
    return masked_transform(x, edge, softcap, scale), edge, column


@triton.jit
def span_statistics(
    row_ptr,  # [V_local]
    target_ptr,  # of this row
    part,
    span_blocks,  # blocks of a part
    start,  # global id of column 0
    real_columns,  # K
    ignore_index,
    softcap,  # None: no softcap
    scale,  # see `split_scale`; None: 1
    HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Statistics of one part of a row: target, and m, d, u_y, s, number of columns, t, argmax, as scalars.

    Nothing but its first block is read of an ignored row, whose statistics nobody uses, unless the argmax is asked for.
    """
    VEC: tl.constexpr = 16 // (row_ptr.dtype.element_ty.primitive_bitwidth // 8)
    BLOCK: tl.constexpr = UNROLL * THREADS * VEC
    # Positions count from the body, which begins at the row's first multiple of 16 bytes.
    body_ptr, head = ceil_to_vector(row_ptr)
    if not HAS_EDGES:
        head = 0
    body = tl.maximum(real_columns - head, 0) // VEC * VEC
    first = part * span_blocks * BLOCK
    stop = tl.minimum(first + span_blocks * BLOCK, body)
    # One block ahead: while a block is summed up, the next one is on its way.
    block = load_block(body_ptr, first, stop, UNROLL, THREADS, VEC)

    target = tl.load(target_ptr).to(tl.int64)
    owned = (part == 0) & (target >= start) & (target < start + real_columns)
    u_y = tl.load(row_ptr + tl.where(owned, target - start, 0), mask=owned, other=-float("inf")).to(tl.float32)
    u_y = masked_transform(u_y, owned, softcap, scale)
    if not HAS_ARGMAX:
        stop = tl.where(target == ignore_index, first, stop)

    m = tl.full([THREADS], -float("inf"), dtype=tl.float32)
    n = tl.zeros([THREADS], dtype=tl.float32)
    if HAS_EDGES:
        m, edge, _ = _load_edges(row_ptr, head, body, real_columns, part == PARTS - 1, softcap, scale, THREADS, VEC)
        n = edge.to(tl.float32)
    state = _begin(m, n, first, scale)

    at = first
    for next_at in range(first + BLOCK, stop, BLOCK):
        next_block = load_block(body_ptr, next_at, stop, UNROLL, THREADS, VEC)
        state = _add_block(
            block, True, at, state, softcap, scale, True, HAS_SMOOTHING, HAS_ENTROPY, HAS_ARGMAX, UNROLL, THREADS, VEC
        )
        block, at = next_block, next_at
    mask = at + block_positions(UNROLL, THREADS, VEC) < stop
    state = _add_block(
        block, mask, at, state, softcap, scale, False, HAS_SMOOTHING, HAS_ENTROPY, HAS_ARGMAX, UNROLL, THREADS, VEC
    )
    m, r, d, lost, s, n, t, t_lost, best, best_at = state

    row_m = tl.max(m, axis=0)
    base = tl.where(row_m == -float("inf"), 0.0, row_m)
    one = tl.where(m == -float("inf"), SHIFTED_ONE, shifted_exp(m - tl.where(r == -float("inf"), 0.0, r), scale))
    row_d = sum_of_threads(tl.div_rn(d - lost, one) * exp_weight(m - base, scale))
    row_s = 0.0
    row_n = 0.0
    row_t = 0.0
    column = NO_COLUMN
    if HAS_SMOOTHING:
        for u in tl.static_range(UNROLL):
            n += tl.where(at + (u * THREADS + tl.arange(0, THREADS)) * VEC < stop, VEC, 0)
        row_s = tl.sum(s + tl.where(n > 0.0, n * (r - base), 0.0), axis=0)
        row_n = tl.sum(n, axis=0)
    if HAS_ENTROPY:
        row_t = sum_relative_to(base, t - t_lost, d - lost, m, r, one, scale)
    if HAS_ARGMAX:
        column = column_of_max(body_ptr, best, best_at, row_m, stop, softcap, scale, UNROLL, THREADS, VEC)
        column = tl.where(column == NO_COLUMN, NO_COLUMN, head + column)
        if HAS_EDGES:
            u, edge, edge_column = _load_edges(
                row_ptr, head, body, real_columns, part == PARTS - 1, softcap, scale, THREADS, VEC
            )
            of_edges = tl.where(edge & (u == row_m), edge_column, NO_COLUMN)
            column = tl.minimum(column, tl.min(of_edges, axis=0))
        column = tl.where(column == NO_COLUMN, NO_COLUMN, start.to(tl.int32) + column)
    return target, row_m, row_d, u_y, row_s, row_n, row_t, column
