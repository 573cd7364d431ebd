"""The column of a row's max. While a row is walked, a thread keeps no column, only the block in which its max rose.

At the end the threads that have the row's max read those blocks again, which are few and lie in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.transform import masked_transform
from te_ce.kernels.vectors import block_positions

# Of a row without columns.
NO_COLUMN = tl.constexpr(2147483647)


@triton.jit
def column_of_max(
    body_ptr,
    best,  # [THREADS], max of the thread's columns of the body
    best_at,  # [THREADS], position of the block in which it was first met: a multiple of the block
    row_m,
    stop,  # a whole number of vectors
    softcap,
    scale,
    UNROLL: tl.constexpr,
    THREADS: tl.constexpr,
    VEC: tl.constexpr,
):
    """The first position in the body at which the row has its max, NO_COLUMN where it has it nowhere."""
    offs_v = tl.arange(0, UNROLL)[:, None, None] * THREADS + tl.arange(0, THREADS)[None, :, None]
    vectors = (best_at // VEC)[None, :, None] + offs_v
    mask = ((best == row_m)[None, :, None] & (vectors < stop // VEC)) & (tl.arange(0, VEC)[None, None, :] >= 0)
    position = best_at[None, :, None] + block_positions(UNROLL, THREADS, VEC)
    x = tl.load(body_ptr + position, mask=mask, other=-float("inf")).to(tl.float32)
    u = masked_transform(x, mask, softcap, scale)
    # Compared with each other, not with the row's max: equal whatever the compiler contracts.
    is_best = mask & (u == tl.max(tl.max(u, axis=2), axis=0)[None, :, None])
    column = tl.where(is_best, position, NO_COLUMN)
    return tl.min(tl.min(tl.min(column, axis=2), axis=0), axis=0)
