"""The gradient of the logits as a few numbers a row, and of an element from these.

With A, B, C, E of `te_ce.reference.logits_gradient`, and f = z_i - max z: dz_i = e^f (P - Q f) - C - B [i = y], where
P = (A + E log d) / d and Q = E / d. Under a scale f is scale (v_i - v), v_i the logit before the scale, and v that of
which z has its max. Of A the entropy's share is -E H = -E (log d - t/d), so that A + E log d has
E t/d in its place: log d is not even taken. What there is not is neither read nor computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.numerics import LN_2, LOG2_E
from te_ce.kernels.rows import at_row
from te_ce.kernels.transform import direction_of, transform

# What an element's gradient is made of besides P: Q, B, C, and a scale. Bits of a constant.
LOG, TARGET, CLASS, SCALE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)


@triton.jit
def _row_value(strided, row, inner, HAS_INNER: tl.constexpr):
    """Of (pointer, stride_outer, stride_inner), in float32."""
    return tl.load(at_row(strided[0], row, inner, strided[1], strided[2], HAS_INNER)).to(tl.float32)


@triton.jit
def row_coefficients(
    row,
    inner,
    is_class,  # the target
    upstream,  # gradients of loss, log-probs, entropy and lse: (pointer, stride_outer, stride_inner), pointers or None
    row_scale,  # likewise
    weights,  # 1 - a', and a'/V or None, 2 w or None
    scale,  # of all rows, or None
    saved_ptr,  # [2 or 3, N]
    saved_stride,
    HAS_INNER: tl.constexpr,
):
    """v, P, 2 Q log 2, B, C, each but v times the scale, and scale log2(e); 0 where there is none."""
    grad_loss, grad_log_probs, grad_entropy, grad_lse = upstream
    target_weight, class_weight, lse_weight = weights
    m = tl.load(saved_ptr + row)
    d = tl.load(saved_ptr + saved_stride + row)
    zero = tl.full((), 0.0, tl.float32)
    of_exp, of_log, of_target, of_class, of_all, factor = zero, zero, zero, zero, zero + 1.0, zero + LOG2_E
    if row_scale[0] is not None:
        of_all = _row_value(row_scale, row, inner, HAS_INNER)
    elif scale is not None:
        of_all = zero + scale
    v = m
    if (row_scale[0] is not None) or (scale is not None):
        v = tl.where(of_all == 0.0, 0.0, m / direction_of(of_all))
        m = v * of_all
        # An infinite factor would make NaN of a difference of 0.
        factor = tl.minimum(tl.maximum(of_all * LOG2_E, -3.4e38), 3.4e38)
    if grad_loss[0] is not None:
        g = _row_value(grad_loss, row, inner, HAS_INNER) * of_all
        of_exp, of_target = g, g * target_weight
        if class_weight is not None:
            of_class = g * class_weight
        if lse_weight is not None:
            of_exp = g * (1.0 + lse_weight * (m + tl.log(d)))
    if grad_lse[0] is not None:
        of_exp += _row_value(grad_lse, row, inner, HAS_INNER) * of_all
    if grad_log_probs[0] is not None:
        g = _row_value(grad_log_probs, row, inner, HAS_INNER) * of_all
        of_exp -= g
        of_target -= g
    if grad_entropy[0] is not None:
        g = _row_value(grad_entropy, row, inner, HAS_INNER) * of_all
        of_exp += g * (tl.load(saved_ptr + 2 * saved_stride + row) / d)
        # For half of the logarithms of base 2.
        of_log = g * (2.0 * LN_2) / d
    of_exp = tl.where(is_class, of_exp, float("nan")) / d
    return v, of_exp, of_log, of_target, of_class, factor


@triton.jit
def element_gradient(
    x,
    column,  # of the same shape
    of_row,  # see row_coefficients
    softcap,  # or None
    target_column,
    real_columns,
    IS_SPECIAL: tl.constexpr,  # the target or padding may be among the columns
    PRESENT: tl.constexpr,  # sum of LOG, TARGET, CLASS, SCALE
):
    """Gradient of the logits `x` in float32; the same of an element wherever in a tile it lies."""
    max_v, of_exp, of_log, of_target, of_class, factor = of_row
    v, tanh = transform(x.to(tl.float32), softcap, None)
    if PRESENT & SCALE == 0:
        factor = LOG2_E
    if PRESENT & LOG == 0:
        grad = tl.exp2((v - max_v) * factor) * of_exp
    else:
        # By halves: an exponential that float32 has no room for would lose what a large logarithm makes of it. Where it
        # is 0 the logarithm may be infinite, and is to count for nothing.
        half = tl.maximum((v - max_v) * (0.5 * factor), -128.0)
        root = tl.exp2(half)
        grad = (root * (of_exp - of_log * half)) * root
    if PRESENT & CLASS != 0:
        grad -= of_class
    if IS_SPECIAL and PRESENT & TARGET != 0:
        if PRESENT & LOG == 0:
            grad = tl.where(column == target_column, grad - of_target, grad)
        else:
            # The same, in fewer registers.
            grad -= tl.where(column == target_column, of_target, 0.0)
    if softcap is not None:
        grad *= (1.0 - tanh) * (1.0 + tanh)
    if IS_SPECIAL:
        grad = tl.where(column < real_columns, grad, 0.0)
    return grad
