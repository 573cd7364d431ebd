"""t, the sum of (u - m) exp(z - max z), which the entropy log d - a t/d takes: a sum like d, but it moves with its max.

Relative to a max that is higher by h, d becomes d exp(-a h), and t becomes (t - h d) exp(-a h). Without a scale a is 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.numerics import clamped, exp_weight


@triton.jit
def weighed_logarithm(x, exp, scale):
    """x exp(a x) for the sum t; 0, not NaN, where x is -inf. NaN is left to `exp`."""
    return clamped(x, scale) * exp


@triton.jit
def lower(t, d, by, scale):
    """t exp(-a h) of t and d relative to a max that is lower by h = -by >= 0, the factor exp(-a h) still to come.

    Where `by` is -inf, that factor is 0 and so is the sum.
    """
    return t + clamped(by, scale) * d


@triton.jit
def sum_relative_to(
    row_m,  # -inf as 0
    t,  # [THREADS], as all that follow; relative to r, as d
    d,
    m,
    r,
    one,  # what the max adds to d
    scale,
):
    """The sum of the threads' t, relative to the max of the row."""
    is_empty = m == -float("inf")
    of_max = lower(t, d, tl.where(is_empty, 0.0, r - m), scale) / one
    by = tl.where(is_empty, 0.0, m - row_m)
    return tl.sum(lower(of_max, d / one, by, scale) * exp_weight(by, scale), axis=0)
