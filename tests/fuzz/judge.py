"""Float64 bounds, where what is stored may overflow its dtype, and where several gradients add up."""

from __future__ import annotations

import torch
from torch import Tensor

from te_ce import LossOptions
from te_ce.outputs import OutputGrads
from tests.support.bounds import check_within, gradient_bound, unit_in_last_place
from tests.support.dense import Dense, dense


class Expected:
    """The gradient of the logits, added up loss by loss, and how far off it may be."""

    def __init__(self, logits: Tensor, ulps: float) -> None:
        """Of `logits` [.., columns], where a rounding may be off by `ulps` units in the last place."""
        self._logits, self._ulps = logits, ulps
        self._parts: list[Tensor] = []
        self._bound = torch.zeros(logits.reshape(-1, logits.shape[-1]).shape, dtype=torch.float64)

    def add(self, target: Tensor, options: LossOptions, upstream: OutputGrads) -> Dense:
        """One more loss on the same logits; returns its truth."""
        truth = dense(self._logits, target, options, upstream)
        rows = self._bound.shape[0]
        bound = gradient_bound(truth, target, options, upstream) if rows else truth.p
        self._bound[:, : bound.shape[1]] += bound.nan_to_num(0.0)
        self._bound += self._ulps * unit_in_last_place(truth.grad.nan_to_num(), self._logits.dtype)
        self._parts.append(truth.grad)
        return truth

    def check(self, grad: Tensor) -> None:
        """`grad` is the sum: autograd adds gradients in their dtype, with one rounding each."""
        total = torch.stack(self._parts).sum(0)
        additions = len(self._parts) - 1
        largest = torch.stack([part.nan_to_num().abs() for part in self._parts]).sum(0)
        bound = self._bound + additions * unit_in_last_place(largest, self._logits.dtype)
        if additions:
            # What overflowed before it was added may be anything.
            over = largest + bound >= torch.finfo(self._logits.dtype).max
            grad = torch.where(over, 0.0, grad.detach().cpu().double().reshape(total.shape))
            total = torch.where(over, 0.0, total)
        check_stored("gradient", grad, total, bound, self._logits.dtype)


def check_stored(name: str, got: Tensor, truth: Tensor, bound: Tensor, dtype: torch.dtype) -> None:
    """As `check_within`, where what `dtype` cannot hold is an infinity; next to its largest number either will do."""
    largest = torch.finfo(dtype).max
    got = got.detach().cpu().double().reshape(truth.shape)
    above = (got >= largest) & (truth + bound >= largest)
    below = (got <= -largest) & (truth - bound <= -largest)
    over = truth.isfinite() & (above | below)
    check_within(name, torch.where(over, 0.0, got), torch.where(over, 0.0, truth), bound)


def check_reduced(loss: Tensor, terms: Tensor, count: Tensor | int, within: float) -> None:
    """`loss` is one number, the sum of `terms` over `count`, off by no more than `within` of their sizes."""
    assert loss.shape == ()
    got, total = loss.double().cpu(), terms.sum() / count
    if got.isfinite() and total.isfinite():
        size = (terms.abs().sum() + terms.numel()) / count
        assert float((got - total).abs()) <= within * float(size), f"loss: {got:.9g}, not {total:.9g}"
        return
    overflowed = got.isinf() and total.sign() == got.sign() and total.abs() > 0.9 * torch.finfo(torch.float32).max
    assert bool(got == total) or bool(got.isnan() and total.isnan()) or bool(overflowed), f"loss: {got}, not {total}"


def counted(target: Tensor, options: LossOptions) -> Tensor | int:
    """What the reduced loss is divided by: rows that are not ignored, at least 1; 1 for a sum."""
    if options.reduction != "mean":
        return 1
    return (target.cpu() != options.ignore_index).sum().clamp(min=1)
