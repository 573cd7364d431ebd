"""What the loss is taken of: z = scale cap tanh(x / cap) of a logit x, in the same arithmetic forward and backward.

Padding lanes are to be masked afterwards: a lane of -inf becomes -cap, and +inf under a negative scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_ce.kernels.numerics import LOG2_E

_SIGN = tl.constexpr(-2147483648)


@triton.jit
def transform(
    x,  # float32, any shape
    softcap,  # cap, float32
    scale,  # float32
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """z, and tanh(x / cap); without a softcap the second is `x`."""
    z = x
    tanh = x
    if HAS_SOFTCAP:
        # With e = exp(-2 |x| / cap) <= 1 nothing overflows, and 1 at infinity is exact.
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E / softcap))
        # A reciprocal of few instructions, right to 2^-22, and one step of Newton's for the quotient.
        root = tl.rsqrt(1.0 + e)
        reciprocal = root * root
        quotient = (1.0 - e) * reciprocal
        tanh = _fma(_fma(quotient, -1.0 - e, 1.0 - e), reciprocal, quotient)
        tanh = (tanh.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)
        z = _product(tanh, softcap * scale if HAS_SCALE else softcap)
    elif HAS_SCALE:
        z = _product(x, scale)
    return z, tanh


@triton.jit
def masked_transform(
    x,  # -inf where `mask` is off
    mask,
    softcap,  # None: no softcap
    scale,  # None: 1
):
    """z, and -inf where `mask` is off."""
    if softcap is not None or scale is not None:
        x, _ = transform(x, softcap, scale, softcap is not None, scale is not None)
        x = tl.where(mask, x, -float("inf"))
    return x


@triton.jit
def _fma(x, y, z):
    x, y = tl.broadcast(x, y)
    x, z = tl.broadcast(x, z)
    return tl.fma(x, y, z)


@triton.jit
def _product(x, factor):
    """x * factor, rounded: contracted with the subtraction of the max, the max itself would differ from its product."""
    return tl.fma(x, tl.zeros_like(x) + factor, tl.zeros_like(x))
