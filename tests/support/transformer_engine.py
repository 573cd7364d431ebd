"""What the tests of Transformer Engine's interface share: inputs, the call, and the truth."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_ce import LossOptions
from te_ce.transformer_engine import parallel_cross_entropy
from tests.support.dense import Dense, dense
from tests.support.subject import Subject

B, S, V = 2, 5, 67


def draw(subject: Subject, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [b, s, V], target with one ignored row, gradient of the loss [b, s]."""
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(B, S, V, generator=random).mul(3).to(dtype)
    target = torch.randint(V, (B, S), generator=random)
    target[0, 1] = -100
    return logits.to(subject.device), target.to(subject.device), torch.randn(B, S, generator=random).to(subject.device)


def call(subject: Subject, *arguments: Any, **keywords: Any) -> Tensor:
    with subject.serving():
        return parallel_cross_entropy(*arguments, **keywords)


def truth_of(logits: Tensor, target: Tensor, g: Tensor, alpha: float = 0.0, ignore_idx: int = -100) -> Dense:
    """By torch's own loss, in float64 on the CPU; rows flattened. `g` of one element is that of the mean."""
    x = logits.detach().cpu().double().reshape(-1, logits.shape[-1]).requires_grad_()
    y, g = target.cpu().reshape(-1), g.detach().cpu().double()
    loss = F.cross_entropy(x, y, label_smoothing=alpha, ignore_index=ignore_idx, reduction="none")
    g = g.reshape(-1) if g.numel() > 1 else (g.reshape(1) / (y != ignore_idx).sum()).expand_as(loss)
    (grad,) = torch.autograd.grad(loss, x, g)
    of_logits = dense(x, y, LossOptions(ignore_index=ignore_idx), torch.ones_like(y))
    return of_logits._replace(loss=loss.detach(), grad=grad)
