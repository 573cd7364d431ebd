"""What the loss is taken of: z = scale cap tanh(x / cap) of a logit x, kept as u with z = a u, a = |scale|.

u = cap tanh(x / cap), or x, with the sign of the scale. Statistics are of u, and only differences are multiplied by a:
they are exact where it matters, while z would be rounded before its max is subtracted. The same arithmetic forward and
backward.

Padding lanes are to be masked afterwards: a lane of -inf becomes -cap, and +inf under a negative scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.numerics import LOG2_E

_SIGN = tl.constexpr(-2147483648)

# 2^64. A power of two goes from scales past it, or below its reciprocal, to the factor of x, which is exact: so a and
# what is made of it stay far from the largest and the smallest number.
_LARGE = tl.constexpr(18446744073709551616.0)


@triton.jit
def direction_of(scale):
    """The factor of x: the sign of the scale, times a power of two where it is too large or too small."""
    size = tl.abs(scale)
    power = tl.where(size > _LARGE, _LARGE, tl.where(size < 1.0 / _LARGE, 1.0 / _LARGE, 1.0))
    return tl.where(scale < 0.0, -power, tl.where(scale == 0.0, 0.0, power))


@triton.jit
def split_scale(
    scale,  # float32
    rest,  # what float32 leaves of it; None: nothing
):
    """What kernels take for `scale`: factor of x; a, in double; a log2(e) as high + low, both positive; and 1 / a.

    `low` is no rounding error of either sign, but what a `high` that is too small by 2^-20 leaves: of a product of -inf
    and a sum with it nothing is NaN. Where a is 1 it is too small to change a bit, which are those of no scale. A scale
    of 0, which has no sign, is a factor 0, and a is 1.
    """
    # The interpreter gives a number as what it is, no scalar of float32.
    scale = tl.full((), 0.0, tl.float32) + scale
    direction = direction_of(scale)
    size = tl.abs(scale).to(tl.float64)
    if rest is not None:
        size += tl.where(scale < 0.0, -rest, rest).to(tl.float64)
    size = tl.where(scale == 0.0, 1.0, size * (1.0 / tl.abs(direction)).to(tl.float64))
    factor = size * LOG2_E
    high = (factor * tl.where(size == 1.0, 1.0, 1.0 - 2.0**-20)).to(tl.float32)
    low = tl.where(size == 1.0, 1e-37, (factor - high).to(tl.float32))
    return direction, size, high, low, 1.0 / size.to(tl.float32)


@triton.jit
def transform(
    x,  # float32, any shape
    softcap,  # cap, float32; None: no softcap
    direction,  # factor of `split_scale`; None: 1
):
    """u, and tanh(x / cap); without a softcap the second is `x`."""
    u = x
    tanh = x
    if softcap is not None:
        # With e = exp(-2 |x| / cap) <= 1 nothing overflows, and 1 at infinity is exact.
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E / softcap))
        # A reciprocal of few instructions, right to 2^-22, and one step of Newton's for the quotient.
        root = tl.rsqrt(1.0 + e)
        reciprocal = root * root
        quotient = (1.0 - e) * reciprocal
        tanh = _fma(_fma(quotient, -1.0 - e, 1.0 - e), reciprocal, quotient)
        tanh = (tanh.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)
        u = _product(tanh, softcap if direction is None else softcap * direction)
    elif direction is not None:
        u = _product(x, direction)
    return u, tanh


@triton.jit
def masked_transform(
    x,  # -inf where `mask` is off
    mask,
    softcap,  # None: no softcap
    scale,  # see `split_scale`; None: 1
):
    """u, and -inf where `mask` is off."""
    if softcap is not None or scale is not None:
        x, _ = transform(x, softcap, None if scale is None else scale[0])
        x = tl.where(mask, x, -float("inf"))
    return x


@triton.jit
def of_z(m, u_y, s, t, scale):
    """The max, the target's distance from it, s and t, of z instead of u."""
    from_max = u_y - m
    if scale is not None:
        m, from_max, s, t = _times(m, scale), _times(from_max, scale), _times(s, scale), _times(t, scale)
    return m, from_max, s, t


@triton.jit
def _times(x, scale):
    return (x.to(tl.float64) * scale[1]).to(tl.float32)


@triton.jit
def _fma(x, y, z):
    x, y = tl.broadcast(x, y)
    x, z = tl.broadcast(x, z)
    return tl.fma(x, y, z)


@triton.jit
def _product(x, factor):
    """x * factor, rounded: contracted with the subtraction of the max, the max itself would differ from its product."""
    return tl.fma(x, tl.zeros_like(x) + factor, tl.zeros_like(x))
