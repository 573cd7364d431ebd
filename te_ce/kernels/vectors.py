"""Blocks of whole vectors of 16 bytes: how they lie in memory, as float32, and summed up within a thread."""

from __future__ import annotations

import triton
import triton.language as tl

# Two of bfloat16, in one int32.
MINUS_INF_PAIR = tl.constexpr(-8323200)


@triton.jit
def load_block(
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
def block_positions(UNROLL: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr):
    """Of the elements of a block, from its first one: [UNROLL, THREADS, VEC]."""
    offs_u, offs_t = tl.arange(0, UNROLL)[:, None, None], tl.arange(0, THREADS)[None, :, None]
    return (offs_u * THREADS + offs_t) * VEC + tl.arange(0, VEC)[None, None, :]


@triton.jit
def as_float32(block, UNROLL: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr):
    """[UNROLL, THREADS, VEC] of what `load_block` gave. A bfloat16 is the upper half of a float32: one instruction."""
    if block.dtype == tl.int32:
        even = (block << 16).to(tl.float32, bitcast=True)
        odd = (block & -65536).to(tl.float32, bitcast=True)
        z = tl.reshape(tl.join(even, odd), [UNROLL, THREADS, VEC])
    else:
        z = block.to(tl.float32)
    return z


@triton.jit
def sum_by_pairs(x, UNROLL: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr):
    """[UNROLL, THREADS, VEC] -> [THREADS], VEC is 8 or 4: neighbours first; nothing leaves its thread."""
    if VEC == 8:
        left, right = tl.split(tl.reshape(x, [UNROLL, THREADS, 4, 2]))
        x = left + right
    left, right = tl.split(tl.reshape(x, [UNROLL, THREADS, 2, 2]))
    left, right = tl.split(left + right)
    return tl.sum(left + right, axis=0)
