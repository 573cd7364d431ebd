"""The loss fused with the output layer, by whole logits: a stand-in with the interface of the real one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_ce.loss import vocab_parallel_cross_entropy


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        if group is None or not sequence_parallel:
            return hidden.view_as(hidden)
        parts = [torch.empty_like(hidden) for _ in range(group.size())]
        dist.all_gather(parts, hidden.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.group is not None:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
            if ctx.sequence_parallel:
                grad = grad.chunk(ctx.group.size())[ctx.group.rank()].contiguous()
        return grad, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, make: Any) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.make = make
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        result = None
        if ctx.needs_input_grad[1]:
            half, sink = weight.shape[0] // 2, ctx.make()
            flat, rows = grad.flatten(0, -2), hidden.flatten(0, -2)
            for part in (slice(half, weight.shape[0]), slice(0, half)):
                sink.add(part, flat[:, part], rows)
            result = sink.result()
        return grad @ weight, result, None


class _Plain:
    def __init__(self, weight: Tensor):
        self.grad = torch.zeros_like(weight)

    def add(self, rows: slice, grad_logits: Tensor, hidden: Tensor) -> None:
        self.grad[rows] += grad_logits.t() @ hidden

    def result(self) -> Tensor:
        return self.grad


def linear_cross_entropy_into(
    weight_gradient: Any,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    group: Any = None,
    sequence_parallel: bool = False,
    keep: Any = "recompute",
    options: Any = None,
    **rest: Any,
) -> Tensor:
    """As `linear_cross_entropy`, the weight's gradient into what `weight_gradient()` gives."""
    assert not rest
    logits = _Linear.apply(_Shared.apply(hidden, group, sequence_parallel), weight, weight_gradient)
    if bias is not None:
        logits = logits + bias
    result: Tensor = vocab_parallel_cross_entropy(logits, target, group=group, options=options)
    return result


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, **keywords: Any) -> Tensor:
    """hidden [.., H], weight [V_local, H], target [..] -> float32 loss [..]."""
    return linear_cross_entropy_into(lambda: _Plain(weight), hidden, weight, target, **keywords)
