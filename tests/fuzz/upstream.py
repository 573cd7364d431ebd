"""The gradients that come back: which of them there are, and the backward from them."""

from __future__ import annotations

import torch
from torch import Tensor

from te_ce import LossOutput
from te_ce.outputs import OutputGrads


def used(grads: OutputGrads, outputs: tuple[str, ...], without: frozenset[str]) -> OutputGrads:
    """The gradients of what was asked for and is used."""
    return OutputGrads(
        *(
            grad if (name == "loss" or name in outputs) and name not in without else None
            for name, grad in grads._asdict().items()
        )
    )


def differentiable(values: LossOutput, grads: OutputGrads) -> tuple[list[Tensor], list[Tensor]]:
    """The values that have a gradient to be used, and their gradients."""
    pairs = [(getattr(values, name), grad) for name, grad in grads._asdict().items() if grad is not None]
    pairs = [(value, grad) for value, grad in pairs if value.requires_grad]
    return [value for value, _ in pairs], [grad for _, grad in pairs]


def backward(values: LossOutput, grads: OutputGrads) -> bool:
    """From all that is used; returns whether anything is."""
    tensors, upstream = differentiable(values, grads)
    if tensors:
        torch.autograd.backward(tensors, upstream)
    return bool(tensors)


def as_output(result: Tensor | LossOutput) -> LossOutput:
    """What the loss returns, always as an object with the loss."""
    return result if isinstance(result, LossOutput) else LossOutput(result)


def named(values: LossOutput) -> dict[str, Tensor]:
    """Those that there are, without their graph."""
    return {name: value.detach() for name, value in values._asdict().items() if value is not None}
