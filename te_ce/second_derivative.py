"""A gradient that can't be differentiated again says so, where autograd would silently take it for a constant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def forbid_second_derivative(grad: Tensor, *inputs: Tensor) -> Tensor:
    """`grad`, whose differentiation with respect to any of `inputs` is an error.

    For a backward that runs with create_graph=True.
    """
    result: Tensor = _Undifferentiable.apply(grad, *inputs)
    return result


class _Undifferentiable(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            "the gradient of te_ce's loss was differentiated again, which is not supported; use "
            "torch.nn.functional.cross_entropy where second derivatives are needed"
        )
