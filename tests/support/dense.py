"""The truth: the loss of unsharded logits in float64, by torch's own logsumexp, gather and autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_ce import LossOptions


class Dense(NamedTuple):
    """Float64 loss [N], gradient [N, columns] and softmax [N, columns] (0 at padding) of flattened rows."""

    loss: Tensor
    grad: Tensor
    p: Tensor


def dense_loss(logits: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """Float64 loss of every row, differentiable, written from the definition; NaN where the target is no class."""
    classes = logits.shape[-1] if options.vocab_size is None else options.vocab_size
    x = logits.double().reshape(-1, logits.shape[-1])[:, :classes]
    y = target.reshape(-1).long()
    is_class = (y >= 0) & (y < classes)
    log_p = x - x.logsumexp(-1, keepdim=True)
    nll = -log_p.gather(1, torch.where(is_class, y, 0)[:, None])[:, 0]
    alpha = options.label_smoothing
    if alpha and options.smoothing == "uniform":
        loss = (1 - alpha) * nll - alpha * log_p.mean(-1)
    elif alpha:
        loss = (1 - alpha) * nll + alpha / (classes - 1) * (-log_p.sum(-1) - nll)
    else:
        loss = nll
    loss = torch.where(is_class, loss, torch.nan)
    return torch.where(y == options.ignore_index, 0.0, loss)


def dense(logits: Tensor, target: Tensor, options: LossOptions, grad_loss: Tensor) -> Dense:
    """Loss, gradient under `grad_loss` (of the target's shape), and softmax. Rows are independent of each other."""
    columns = logits.shape[-1]
    classes = columns if options.vocab_size is None else options.vocab_size
    x = logits.detach().cpu().double().reshape(-1, columns).requires_grad_()
    y, g = target.cpu().reshape(-1), grad_loss.detach().cpu().double().reshape(-1)
    loss = dense_loss(x, y, options)
    kept = (y != options.ignore_index) & ~loss.isnan()
    (grad,) = torch.autograd.grad((loss * g)[kept].sum(), x)
    bad = loss.isnan()
    grad[bad, :classes] = torch.nan
    p = torch.zeros_like(x.detach())
    p[:, :classes] = x.detach()[:, :classes].softmax(-1)
    return Dense(loss.detach(), grad, p)
