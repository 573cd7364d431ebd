"""The GEMMs: cuBLAS, or whatever serves torch on the device, accumulating in float32.

Written into views of buffers that live longer: `out` may be rows or columns of something larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)


def logits_into(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out [N, C] = hidden [N, H] weight^T [H, C] + bias [C], rounded once to their dtype."""
    if bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def set_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a b, in the dtype of `a` or in float32, whichever `out` has."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b, `out` in float32 where a and b have half of its bits; no copy of them on a GPU."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of products of `dtype` are kept in."""
    return torch.float32 if dtype in _HALVES else dtype
