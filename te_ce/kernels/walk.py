"""The walk of a program over a span of one row: read once, block by block, into the statistics of the span.

Every thread keeps statistics of its own columns, so that no two threads meet before the last block: its max m, a
reference r that the max may exceed by SLACK before it follows, and the sum of exp(z - r). Following seldom keeps the
rounding of a rescaling out of the sum: each one that happens weighs what was summed before by less than exp(-SLACK).

The sum of a confident row is the 1 of its max and many small terms, which rounding at 1 would lose to one side: blocks
are summed by pairs, and added up with compensation (Kahan 1965). At the end the sum is divided by the max's own term,
so that the max counts exactly 1; then the threads' sums are split into a part that adds up exactly and a small rest.

Loads are of whole vectors of 16 bytes. The columns before the first and after the last whole vector (odd vocabularies)
are loaded one by one, and become the first columns of the threads. Which columns a thread sums depends on the address
of the row modulo 16 bytes and on nothing else: cut at lines of 128 bytes, rows of 50264 would sum otherwise in another
batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.numerics import LOG2_E, exp_weight
from te_ce.kernels.rows import ceil_to_vector

# How far, in natural units, a thread's max may exceed its reference.
SLACK = tl.constexpr(0.5)

# Exponents carry this much more: a float32 exponent in [-8, 0] is half as exact as one in [-4, 4].
SHIFT = tl.constexpr(4.0)
SHIFTED_ONE = tl.constexpr(16.0)

# Two of bfloat16, in one int32.
MINUS_INF_PAIR = tl.constexpr(-8323200)

# Adding and subtracting 1.5 * 2^17 rounds a float32 to a multiple of 2^-6; such multiples add up exactly to 2^18.
SPLIT = tl.constexpr(196608.0)


@triton.jit
def _shifted_exp(x):
    """exp(x) * 2^SHIFT; the same for equal x, wherever it is called."""
    return tl.exp2(x * LOG2_E + SHIFT)


@triton.jit
def _sum_by_pairs(x, UNROLL: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr):
    """[UNROLL, THREADS, VEC] -> [THREADS], VEC is 8 or 4: neighbours first; nothing leaves its thread."""
    if VEC == 8:
        left, right = tl.split(tl.reshape(x, [UNROLL, THREADS, 4, 2]))
        x = left + right
    left, right = tl.split(tl.reshape(x, [UNROLL, THREADS, 2, 2]))
    left, right = tl.split(left + right)
    return tl.sum(left + right, axis=0)


@triton.jit
def _load_block(
    pointer,  # of the body
    first,  # position
    stop,  # a whole number of vectors after `first`
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,
):
    """A block as it lies in memory: [UNROLL, THREADS, VEC], bfloat16 as [UNROLL, THREADS, VEC / 2] pairs in int32."""
    IS_PAIRS: tl.constexpr = pointer.dtype.element_ty == tl.bfloat16
    ITEMS: tl.constexpr = VEC // 2 if IS_PAIRS else VEC
    offs_u, offs_t = tl.arange(0, UNROLL)[:, None, None], tl.arange(0, THREADS)[None, :, None]
    offs = (offs_u * THREADS + offs_t) * ITEMS + tl.arange(0, ITEMS)[None, None, :]
    mask = offs < (stop - first) // VEC * ITEMS
    if IS_PAIRS:
        pairs_ptr = (pointer + first).to(tl.pointer_type(tl.int32))
        block = tl.load(pairs_ptr + offs, mask=mask, other=MINUS_INF_PAIR)
    else:
        block = tl.load(pointer + first + offs, mask=mask, other=-float("inf"))
    return block


@triton.jit
def _as_float32(block, UNROLL: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr):
    """[UNROLL, THREADS, VEC] of what `_load_block` gave. A bfloat16 is the upper half of a float32: one instruction."""
    if block.dtype == tl.int32:
        even = (block << 16).to(tl.float32, bitcast=True)
        odd = (block & -65536).to(tl.float32, bitcast=True)
        z = tl.reshape(tl.join(even, odd), [UNROLL, THREADS, VEC])
    else:
        z = block.to(tl.float32)
    return z


@triton.jit
def _add_block(
    block,  # -inf where `mask` is off
    mask,
    m,  # [THREADS], as all that follow
    r,
    d,
    lost,  # what d holds too much
    s,
    n,  # columns so far
    FULL: tl.constexpr,  # the mask is on everywhere
    HAS_SMOOTHING: tl.constexpr,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,
):
    """Statistics of the threads' columns so far, and of one more block of them."""
    z = _as_float32(block, UNROLL, THREADS, VEC)
    new_m = tl.maximum(m, tl.max(tl.max(z, axis=2), axis=0))
    new_r = tl.where(new_m > r + SLACK, new_m, r)
    # While every logit so far is -inf there is no max to subtract: -inf - -inf would be NaN.
    base = tl.where(new_r == -float("inf"), 0.0, new_r)
    rescale = tl.exp2((r - base) * LOG2_E)
    x = z - base[None, :, None]
    term = _sum_by_pairs(_shifted_exp(x), UNROLL, THREADS, VEC) - lost * rescale
    d = d * rescale
    raised = d + term
    lost = (raised - d) - term
    if HAS_SMOOTHING:
        # With r = -inf either there were no columns, or s is -inf already.
        s += tl.where(r == -float("inf"), 0.0, r - base) * n
        s += _sum_by_pairs(x if FULL else tl.where(mask, x, 0.0), UNROLL, THREADS, VEC)
    return new_m, new_r, raised, lost, s


@triton.jit
def span_statistics(
    row_ptr,  # [V_local]
    target_ptr,  # of this row
    part,
    span_blocks,  # blocks of a part
    start,  # global id of column 0
    real_columns,  # K
    ignore_index,
    HAS_SMOOTHING: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Statistics of one part of a row: target, and m, d, z_y, s, number of columns, as scalars.

    Nothing but its first block is read of an ignored row, whose statistics nobody uses.
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
    block = _load_block(body_ptr, first, stop, UNROLL, THREADS, VEC)

    target = tl.load(target_ptr).to(tl.int64)
    owned = (part == 0) & (target >= start) & (target < start + real_columns)
    z_y = tl.load(row_ptr + tl.where(owned, target - start, 0), mask=owned, other=-float("inf")).to(tl.float32)
    stop = tl.where(target == ignore_index, first, stop)

    m = tl.full([THREADS], -float("inf"), dtype=tl.float32)
    n = tl.zeros([THREADS], dtype=tl.float32)
    if HAS_EDGES:
        lane = tl.arange(0, THREADS)
        after = head + body + lane - VEC
        in_head = (lane < head) & (lane < real_columns)
        in_tail = (lane >= VEC) & (after < real_columns)
        edge = (part == PARTS - 1) & (in_head | in_tail)
        m = tl.load(row_ptr + tl.where(in_head, lane, after), mask=edge, other=-float("inf")).to(tl.float32)
        n = edge.to(tl.float32)
    r = m
    x = m - tl.where(m == -float("inf"), 0.0, m)
    d = _shifted_exp(x)
    lost = tl.zeros([THREADS], dtype=tl.float32)
    s = tl.where(n > 0.0, x, 0.0)

    at = first
    for next_at in range(first + BLOCK, stop, BLOCK):
        next_block = _load_block(body_ptr, next_at, stop, UNROLL, THREADS, VEC)
        m, r, d, lost, s = _add_block(block, True, m, r, d, lost, s, n, True, HAS_SMOOTHING, UNROLL, THREADS, VEC)
        n += UNROLL * VEC
        block, at = next_block, next_at
    offs_u, offs_t = tl.arange(0, UNROLL)[:, None, None], tl.arange(0, THREADS)[None, :, None]
    mask = at + (offs_u * THREADS + offs_t) * VEC + tl.arange(0, VEC)[None, None, :] < stop
    m, r, d, lost, s = _add_block(block, mask, m, r, d, lost, s, n, False, HAS_SMOOTHING, UNROLL, THREADS, VEC)

    row_m = tl.max(m, axis=0)
    base = tl.where(row_m == -float("inf"), 0.0, row_m)
    one = tl.where(m == -float("inf"), SHIFTED_ONE, _shifted_exp(m - tl.where(r == -float("inf"), 0.0, r)))
    d = tl.div_rn(d - lost, one) * exp_weight(m - base)
    coarse = (d + SPLIT) - SPLIT
    row_d = tl.sum(coarse, axis=0) + tl.sum(d - coarse, axis=0)
    row_s = 0.0
    row_n = 0.0
    if HAS_SMOOTHING:
        for u in tl.static_range(UNROLL):
            n += tl.where(at + (u * THREADS + tl.arange(0, THREADS)) * VEC < stop, VEC, 0)
        row_s = tl.sum(s + tl.where(n > 0.0, n * (r - base), 0.0), axis=0)
        row_n = tl.sum(n, axis=0)
    return target, row_m, row_d, z_y, row_s, row_n
