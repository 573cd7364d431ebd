"""The autograd node for logits that backward may overwrite in any case: the caller's by agreement, or a copy.

Nothing is left to find out in backward, and there is one backward only. What it saves, and in which form, is what
Transformer Engine's own node saves: tools that look at saved tensors through hooks find the same there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_ce.autograd import LossCall, forward, logits_gradient
from te_ce.layout import readable
from te_ce.outputs import OutputGrads


class OverwritingCrossEntropy(torch.autograd.Function):
    """As `te_ce.autograd.VocabParallelCrossEntropy`, always in place.

    For the options of Transformer Engine: no z-loss, softcap or scale, and no other outputs.
    Saved for backward, in this order: the logits; m and d of every row, [N, 2] float32; the target.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, call: LossCall, row_scale: None) -> Tensor:
        loss, saved, _ = forward(logits, target, call, row_scale)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, saved.t(), target)
            ctx.call = call
            ctx.is_done = False
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.is_done:
            raise RuntimeError(
                "the loss was differentiated before, which overwrote its logits: expected one backward, got another; "
                "use te_ce.vocab_parallel_cross_entropy, or compute the loss again"
            )
        ctx.is_done = True
        logits, saved, target = ctx.saved_tensors
        grads = OutputGrads(readable(grad_loss))
        return logits_gradient(logits, target, grads, saved.t(), ctx.call, None, overwrite=True), None, None, None
