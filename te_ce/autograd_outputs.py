"""The autograd node of the loss with other outputs: one forward, and one backward whatever subset gets a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_ce import ownership
from te_ce.autograd import LossCall, forward, logits_gradient, note_overwriting
from te_ce.layout import may_share_memory, readable
from te_ce.outputs import OutputGrads

# Outputs that no gradient flows to.
FOR_LOGGING = ("z_loss", "predictions")


class CrossEntropyWithOutputs(torch.autograd.Function):
    """Loss and other outputs per row from this rank's columns, and their gradient.

    Per rank: logits [.., V_local], target [..] -> loss [..] float32 and `call.problem.outputs` [..], bit-identical on
    all ranks of the group.

    Forward, beside the loss of `te_ce.autograd.VocabParallelCrossEntropy`, with t = sum (z - m) exp(z - m):
        lse = m + log d, log-prob = (z_y - m) - log d, entropy H = log d - t/d, z-loss = w lse^2
    Gradient, with g, g_lp, g_H, g_lse those of loss, log-prob, entropy and lse:
        dz_i = p_i (A - E (z_i - lse)) - g a'/V - B [i = y],  p_i = exp(z_i - m) / d
        A = g (1 + 2 w lse) + g_lse - g_lp - g_H H,  B = g (1 - a') - g_lp,  E = g_H

    Saved for backward: as without outputs, and 4 bytes a row more with the entropy.
    Collectives: one all-gather in forward, 4 bytes a row more each with the entropy and the predictions; none in
    backward.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, call: LossCall, row_scale: Tensor | None
    ) -> tuple[Tensor, ...]:
        loss, saved, outputs = forward(logits, target, call, row_scale)
        names = call.problem.outputs
        ctx.mark_non_differentiable(
            *(output for name, output in zip(names, outputs, strict=True) if name in FOR_LOGGING)
        )
        if ctx.needs_input_grad[0]:
            if call.inplace == "auto":
                ownership.prepare(logits)
            ctx.save_for_backward(logits, target, saved, row_scale)
            ctx.call, ctx.is_overwritten = call, False
            ctx.set_materialize_grads(False)
        return loss, *outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        call: LossCall = ctx.call
        logits, target, saved, row_scale = ctx.saved_tensors
        grads = output_grads(call.problem.outputs, grad_outputs)
        if all(grad is None for grad in grads):
            return None, None, None, None
        # As in the node without outputs; see there.
        overwrite = (
            ownership.is_sole_owner(ownership.owner_counts(logits)) and not may_share_memory(logits)
            if call.inplace == "auto"
            else bool(call.inplace)
        )
        note_overwriting(ctx, overwrite)
        return logits_gradient(logits, target, grads, saved, call, row_scale, overwrite), None, None, None


def output_grads(names: tuple[str, ...], grads: tuple[Tensor | None, ...]) -> OutputGrads:
    """The gradients of the loss and of the outputs `names`, which lie in this order in `grads`."""
    of_name = dict(zip(("loss", *names), grads, strict=True))
    given = (of_name.get(name) for name in OutputGrads._fields)
    return OutputGrads(*(None if grad is None else readable(grad) for grad in given))
