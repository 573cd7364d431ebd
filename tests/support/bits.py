"""Bits of tensors, which `torch.equal` does not tell: to it 0.0 and -0.0 are equal."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in every bit, any NaN for another."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    nan = one.isnan()
    if not torch.equal(nan, other.isnan()):
        return False
    integer = _INTEGERS[one.element_size()]
    return torch.equal(*(each.masked_fill(nan, 0.0).contiguous().view(integer) for each in (one, other)))
