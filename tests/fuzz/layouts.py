"""The strides that logits, targets and gradients come with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("dense", "long rows", "odd rows", "transposed", "every other row", "strided columns", "one row for all")
"""Of logits."""

STRIDES = ("dense", "transposed", "every other", "expanded")
"""Of all else."""


def lay_out_logits(layout: str, x: Tensor) -> Tensor:
    """The same values (of one row, where it is one for all) with other strides."""
    *rows, columns = x.shape
    if layout in ("long rows", "odd rows"):
        wide = x.new_full((*rows, columns + (64 if layout == "long rows" else 3)), 7.0)
        begin = 32 if layout == "long rows" else 1
        wide[..., begin : begin + columns] = x
        return wide[..., begin : begin + columns]
    if layout == "transposed" and len(rows) > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every other row" and rows:
        spread = x.new_full((2 * rows[0], *x.shape[1:]), 7.0)
        spread[::2] = x
        return spread[::2]
    if layout == "strided columns":
        spread = x.new_full((*rows, 2 * columns), 7.0)
        spread[..., ::2] = x
        return spread[..., ::2]
    if layout == "one row for all" and x.numel():
        return x.reshape(-1, columns)[0].expand(*rows, columns)
    return x.contiguous()


def lay_out(layout: str, x: Tensor) -> Tensor:
    """The same values (one of them, where they are expanded) with other strides."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every other" and x.dim():
        spread = x.new_full((2 * x.shape[0], *x.shape[1:]), 3)
        spread[::2] = x
        return spread[::2]
    if layout == "expanded" and x.numel():
        return x.reshape(-1)[0].expand(x.shape)
    return x


class _View(torch.autograd.Function):
    """The same values in another tensor, which is no leaf and shares its memory with nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _copy_with_strides(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def view(leaf: Tensor) -> Tensor:
    """The same values, and layout, in another tensor of the graph."""
    result: Tensor = _View.apply(leaf)
    return result


def _copy_with_strides(x: Tensor) -> Tensor:
    """In memory of its own; what was expanded is so no more."""
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
