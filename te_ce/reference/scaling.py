"""A sum times one number."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_copy(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """total factor, in a new tensor of `dtype`, rounded once.

    Args:
        total: contiguous, float32 or float64.
        factor: a scalar of its dtype, on its device.
    """
    return torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))
