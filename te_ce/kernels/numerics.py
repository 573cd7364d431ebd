"""Arithmetic that several kernels share: exponentials relative to a max, and the loss of a row from its statistics."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# What float32 leaves of log2(e).
LOG2_E_REST = tl.constexpr(1.925963033500011e-08)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def clamped(x, scale):
    """A difference of u, no lower than where its exponential is 0: an infinite one times 0 would be NaN."""
    lowest = -200.0 if scale is None else -200.0 * scale[4]
    return tl.maximum(x, lowest)


@triton.jit
def exp_weight(x, scale):
    """exp(a x) of x <= 0, -inf included, to about one unit in the last place; `scale` as `transform.split_scale` gives.

    exp2(x * log2(e)) alone is off by |x| * 8e-8, in the same direction for every term that is weighed alike. What the
    product lost by rounding, and log2(e) by being a float32, is put back to first order.
    """
    x = clamped(x, scale)
    if scale is None:
        exponent = x * LOG2_E
        rest = tl.fma(x, tl.full(x.shape, LOG2_E, tl.float32), -exponent) + x * LOG2_E_REST
    else:
        _, size, high, _, _ = scale
        exponent = x * high
        rest = tl.fma(x, tl.zeros_like(x) + high, -exponent) + x * (size * LOG2_E - high).to(tl.float32)
    power = tl.exp2(exponent)
    return power + power * (rest * LN_2)


@triton.jit
def row_loss(
    m,  # max z
    from_max,  # z_y - m
    d,
    s,
    target,
    classes,  # V
    ignore_index,
    weights,  # a', 1 - a', w or None
    HAS_SMOOTHING: tl.constexpr,
):
    """Loss of rows from the statistics of all their columns, of z; float32, of the shape of `m`."""
    smoothing_weight, target_weight, z_loss_weight = weights
    log_d = tl.log(d)
    loss = log_d - from_max
    if HAS_SMOOTHING:
        mean_part = log_d - tl.div_rn(s, classes.to(tl.float32))
        loss = target_weight * loss + smoothing_weight * mean_part
        # Weights of both signs, or 0, would make NaN of a target that costs infinity.
        loss = tl.where((from_max == -float("inf")) & (d > 0.0), float("inf"), loss)
    if z_loss_weight is not None:
        lse = m + log_d
        loss += z_loss_weight * lse * lse
    return of_target(loss, target, classes, ignore_index)


@triton.jit
def of_target(value, target, classes, ignore_index):
    """What is known of a row with this target: NaN where it is no class, 0 where the row is ignored."""
    value = tl.where((target >= 0) & (target < classes), value, float("nan"))
    return tl.where(target == ignore_index, 0.0, value)
