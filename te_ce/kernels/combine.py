"""Statistics of parts of one shard to those of one part: what a rank sends where it read its columns in chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.merge import max_of_parts, sums_of_parts
from te_ce.kernels.statistics import store_statistics
from te_ce.kernels.transform import split_scale


@triton.jit(
    do_not_specialize=["gathered_ptr", "stats_ptr", "row_scale_ptr", "n_rows", "n_parts", "scale", "scale_rest"]
)
def combine_statistics_kernel(
    # input
    gathered_ptr,  # [parts, fields, N] float32
    # output
    stats_ptr,  # [fields, N] float32: m, d, u_y, [s, columns], [t], [argmax, an int32]
    # of some calls, else None
    row_scale_ptr,  # [N] float32
    # sizes
    n_rows: tl.int64,  # N
    n_parts,
    scale,  # of all rows; None: 1, or `row_scale_ptr`
    scale_rest,  # what float32 leaves of it, or None
    # constants
    HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = rows < n_rows
    m_ptr = gathered_ptr + rows
    FIELDS: tl.constexpr = 3 + 2 * HAS_SMOOTHING + HAS_ENTROPY + HAS_ARGMAX
    part_stride = n_rows * FIELDS
    if row_scale_ptr is not None:
        scale = tl.load(row_scale_ptr + rows, mask=mask_n, other=1.0)
    if scale is not None:
        scale = split_scale(scale, scale_rest)
    m, u_y = max_of_parts(m_ptr, m_ptr + 2 * n_rows, part_stride, n_parts, mask_n, BLOCK_N)
    d, s, t, argmax = sums_of_parts(
        m, m_ptr, n_rows, part_stride, n_parts, mask_n, scale, HAS_SMOOTHING, HAS_ENTROPY, HAS_ARGMAX, False, BLOCK_N
    )
    columns = tl.zeros([BLOCK_N], dtype=tl.float32)
    # 0 for the parts of a shard without a max; but NaN where logits are NaN, which have none either.
    d_without_max = tl.zeros([BLOCK_N], dtype=tl.float32)
    part_ptr = m_ptr
    for _ in range(n_parts):
        d_without_max += tl.load(part_ptr + n_rows, mask=mask_n, other=0.0)
        if HAS_SMOOTHING:
            columns += tl.load(part_ptr + 4 * n_rows, mask=mask_n, other=0.0)
        part_ptr += part_stride
    # A shard without a finite logit stays the identity, where a whole row without one has no softmax.
    is_empty = m == -float("inf")
    d = tl.where(is_empty, d_without_max, d)
    s = tl.where(is_empty, tl.where(columns > 0.0, -float("inf"), 0.0), s)
    t = tl.where(is_empty, 0.0, t)
    store_statistics(
        stats_ptr + rows, n_rows, m, d, u_y, s, columns, t, argmax, HAS_SMOOTHING, HAS_ENTROPY, HAS_ARGMAX, mask_n
    )
