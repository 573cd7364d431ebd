"""The autograd node of the linear loss of tokens with known weights: its gradients are made in forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_ce.autograd_outputs import FOR_LOGGING
from te_ce.counters import count_loss
from te_ce.linear.call import LinearCall
from te_ce.linear.nodes import whole_batch
from te_ce.linear.products import sum_dtype
from te_ce.linear.token_walk import loss_and_gradients
from te_ce.linear.vocabulary_walk import Needed
from te_ce.second_derivative import forbid_second_derivative


class WeightedLinearCrossEntropy(torch.autograd.Function):
    """The scalar sum(w L) or sum(w L) / rows not ignored, and the gradients of hidden, weight and bias.

    Per rank: as `te_ce.linear.nodes.LinearCrossEntropy`, and w [..] -> a scalar and `call.problem.outputs` [N].

    Forward makes loss and gradients, each chunk of the logits once. Backward multiplies them by its scalar.

    Saved for backward: the gradients in float32 (of hidden this rank's part with sequence parallelism), for weights
    relative to a power of two near the largest: in float16, small ones would leave nothing of the logits' gradient. And
    the inputs, for their dtypes and for who differentiates the gradients again.
    Collectives: forward gathers the hidden states with sequence parallelism, then the statistics of every chunk of
    tokens, and sums the gradient of hidden over the ranks. Backward has none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        row_scale: Tensor | None,
        token_weights: Tensor,
        call: LinearCall,
        is_differentiable: bool,
    ) -> tuple[Tensor, ...]:
        needed = Needed(*(is_differentiable and each for each in ctx.needs_input_grad[:3]))
        is_counted = target.reshape(-1).long() != call.problem.ignore_index
        # An ignored row adds nothing, whatever its weight.
        flat_weights = torch.where(is_counted, token_weights.reshape(-1).to(sum_dtype(hidden.dtype)), 0.0)
        unit = _power_of_two(flat_weights)
        with torch.autocast(hidden.device.type, enabled=False):
            batch = whole_batch(hidden, weight, bias, target, row_scale, call)
            loss, outputs, sums = loss_and_gradients(batch, flat_weights / unit, call, needed)
        count_loss(call.backend.name)
        total = torch.where(is_counted, flat_weights * loss, 0.0).sum()
        divisor = is_counted.sum().clamp(min=1).to(total.dtype) if call.reduction == "mean" else torch.ones_like(total)
        names = call.problem.outputs
        ctx.mark_non_differentiable(*(each for name, each in zip(names, outputs, strict=True) if name in FOR_LOGGING))
        if is_differentiable:
            ctx.save_for_backward(hidden, weight, bias, unit / divisor, *sums)
            ctx.call = call
            ctx.set_materialize_grads(False)
        return total / divisor, *outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(grad is not None for grad in grad_outputs):
            raise RuntimeError(
                "an output of the linear loss with token_weights was differentiated: expected a gradient of the loss "
                "alone, from which the gradients were made in forward; call without token_weights"
            )
        if grad_loss is None:
            return (None,) * 8
        hidden, weight, bias, rest, *sums = ctx.saved_tensors
        call: LinearCall = ctx.call
        with torch.no_grad():
            factor = grad_loss * rest
            results = [_scaled(total, factor, of, call) for total, of in zip(sums, (hidden, weight, bias), strict=True)]
        if torch.is_grad_enabled():  # create_graph=True
            inputs = [each for each in (hidden, weight, bias, grad_loss) if each is not None]
            results = [None if each is None else forbid_second_derivative(each, *inputs) for each in results]
        return (*results, None, None, None, None, None)


def _power_of_two(weights: Tensor) -> Tensor:
    """The largest power of two that is no larger than the largest of `weights` [N]; 1 where all are 0, or one is not
    finite."""
    largest = weights.abs().amax() if weights.numel() else weights.new_zeros(())
    _, exponent = torch.frexp(largest)
    unit = torch.ldexp(torch.ones_like(largest), exponent - 1)
    return torch.where(largest.isfinite() & (largest > 0.0), unit, 1.0)


def _scaled(total: Tensor | None, factor: Tensor, of: Tensor | None, call: LinearCall) -> Tensor | None:
    """A new tensor of the dtype and shape of `of`, rounded once."""
    if total is None or of is None:
        return None
    return call.backend.scaled_copy(total, factor, of.dtype).view(of.shape)
