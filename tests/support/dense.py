"""The truth: loss and outputs of unsharded logits in float64, by torch's own log_softmax, gather and autograd.

Written from the definitions, not from the formulas of the gradient: whatever gradient they have is autograd's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_ce import LossOptions
from te_ce.outputs import OutputGrads


class Dense(NamedTuple):
    """Float64 truth of N flattened rows.

    Attributes:
        loss: [N].
        grad: [N, columns], of the raw logits.
        p: [N, columns], softmax, 0 at padding.
        log_probs, entropy, lse, z_loss: [N].
        z: [N, classes], the logits after softcap and scale.
        tanh: [N, classes], tanh(x / cap); 0 without a softcap.
        scale: [N, 1].
    """

    loss: Tensor
    grad: Tensor
    p: Tensor
    log_probs: Tensor
    entropy: Tensor
    lse: Tensor
    z_loss: Tensor
    z: Tensor
    tanh: Tensor
    scale: Tensor


def classes_of(columns: int, options: LossOptions) -> int:
    """How many of the columns are classes."""
    return columns if options.vocab_size is None else options.vocab_size


def transformed(x: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """z [N, classes] = scale cap tanh(x / cap), tanh(x / cap) (0 without a cap), and scale [N, 1]."""
    scale = (
        torch.as_tensor(options.scale, dtype=torch.float64).detach().to(x.device).reshape(-1, 1).expand(x.shape[0], 1)
    )
    if options.softcap is None:
        return scale * x, torch.zeros_like(x), scale
    tanh = (x / options.softcap).tanh()
    return scale * (options.softcap * tanh), tanh, scale


def dense_values(logits: Tensor, target: Tensor, options: LossOptions) -> dict[str, Tensor]:
    """Float64 loss, log_probs, entropy, lse and z_loss [N] of every row, differentiable.

    0 in ignored rows, NaN where the target is no class, or the logits have no softmax: a NaN or +inf, or all -inf.
    """
    classes = classes_of(logits.shape[-1], options)
    z, _, _ = transformed(logits.double().reshape(-1, logits.shape[-1])[:, :classes], options)
    y = target.reshape(-1).long()
    is_class = (y >= 0) & (y < classes)
    # Not by logsumexp: of equal logits of 1e30 it has lost log n, even in float64, and so has its derivative.
    log_p = z.log_softmax(-1)
    lse = (z - log_p).gather(1, z.argmax(-1, keepdim=True))[:, 0]
    log_probs = log_p.gather(1, torch.where(is_class, y, 0)[:, None])[:, 0]
    # p log p is 0 where p is, and so is its derivative.
    surprise = -log_p.where(z != -torch.inf, 0.0)
    alpha = options.label_smoothing
    if alpha and options.smoothing == "uniform":
        loss = -(1 - alpha) * log_probs - alpha * log_p.mean(-1)
    elif alpha:
        of_others = log_p.scatter(1, torch.where(is_class, y, 0)[:, None], 0.0).sum(-1)
        loss = -(1 - alpha) * log_probs - alpha / (classes - 1) * of_others
    else:
        loss = -log_probs
    z_loss = options.z_loss_weight * lse**2
    if options.z_loss_weight:
        loss = loss + z_loss
    values = {"loss": loss, "log_probs": log_probs, "lse": lse, "z_loss": z_loss}
    values["entropy"] = (log_p.exp() * surprise).sum(-1)
    ignored = y == options.ignore_index
    is_class &= _has_softmax(z)
    return {name: torch.where(ignored, 0.0, torch.where(is_class, value, torch.nan)) for name, value in values.items()}


def _has_softmax(z: Tensor) -> Tensor:
    return (z < torch.inf).all(-1) & (z > -torch.inf).any(-1)


def dense_loss(logits: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """Float64 loss of every row, differentiable; NaN where the target is no class."""
    return dense_values(logits, target, options)["loss"]


def dense(logits: Tensor, target: Tensor, options: LossOptions, upstream: Tensor | OutputGrads) -> Dense:
    """All values, and the gradient under that of the loss, or of any of the outputs (of the target's shape)."""
    if isinstance(upstream, Tensor):
        upstream = OutputGrads(upstream)
    columns = logits.shape[-1]
    classes = classes_of(columns, options)
    x = logits.detach().cpu().double().reshape(-1, columns).requires_grad_()
    y = target.cpu().reshape(-1).long()
    values = dense_values(x, y, options)
    z, tanh, scale = transformed(x.detach()[:, :classes], options)
    ignored = y == options.ignore_index
    bad = ~ignored & ((y < 0) | (y >= classes) | ~_has_softmax(z))
    kept = ~ignored & ~bad
    total = x.new_zeros(())
    for name, g in upstream._asdict().items():
        if g is not None:
            total = total + (values[name] * g.detach().cpu().double().reshape(-1))[kept].sum()
    grad = torch.autograd.grad(total, x)[0] if total.requires_grad else torch.zeros_like(x)
    # A row that is left out may hold NaN, of which autograd would make 0 * NaN.
    grad[~kept] = 0.0
    grad[bad, :classes] = torch.nan
    p = torch.zeros_like(x.detach())
    p[:, :classes] = z.softmax(-1)
    of_rows = {name: value.detach() for name, value in values.items()}
    return Dense(grad=grad, p=p, z=z, tanh=tanh, scale=scale, **of_rows)
