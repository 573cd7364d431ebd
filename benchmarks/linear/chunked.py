"""The baseline in plain torch that never holds all logits: 512 tokens at a time, each chunk's logits made twice.

It is what published training code falls back to where it has no kernel: logits rounded as the output layer rounds them,
softmax in float32, the weight's gradient a sum of products in the weight's dtype. Short chunks make poor GEMMs, and
every chunk writes a product as large as the weight's gradient and adds it. Written as the published ones are, only
without their options.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKENS = 512


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    """hidden [N, H], weight [V, H], target [N] -> loss [N] float32. Saved: the arguments and a float a row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """loss = lse - z_y, chunk by chunk."""
        loss = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        lse = torch.empty_like(loss)
        for start in range(0, hidden.shape[0], TOKENS):
            part = slice(start, start + TOKENS)
            logits = (hidden[part] @ weight.T).float()
            lse[part] = logits.logsumexp(dim=1)
            loss[part] = lse[part] - logits.gather(1, target[part, None]).squeeze(1)
        ctx.save_for_backward(hidden, weight, target, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        """G = g (p - [i = y]) of the chunk's logits, made again; dX = G weight, dW += G^T hidden."""
        (of_loss,) = upstream
        hidden, weight, target, lse = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, hidden.shape[0], TOKENS):
            part = slice(start, start + TOKENS)
            factor = of_loss[part, None]
            gradient = torch.exp((hidden[part] @ weight.T).float() - lse[part, None]) * factor
            gradient.scatter_add_(1, target[part, None], -factor)
            rounded = gradient.to(hidden.dtype)
            d_hidden[part] = rounded @ weight
            d_weight.add_(rounded.T @ hidden[part])
        return d_hidden, d_weight, None


def chunked_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Loss of every row."""
    loss: Tensor = ChunkedLinearCrossEntropy.apply(hidden, weight, target)
    return loss
