"""NaN and infinities among the logits: what PyTorch does, and never a NaN that the row did not have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_ce import LossOptions
from tests.support.subject import Subject

_INF = torch.inf


def _compare(subject: Subject, logits: Tensor, target: Tensor, alpha: float, widths: tuple[int, ...]) -> Tensor:
    """Check loss and gradient against torch in float64; returns the gradient."""
    logits, target = logits.to(subject.device), target.to(subject.device)
    g = torch.ones(target.shape, device=subject.device)
    losses, grad = subject.run_shards(logits, target, g, LossOptions(label_smoothing=alpha), widths)
    x = logits.double().requires_grad_()
    expected = F.cross_entropy(x, target, label_smoothing=alpha, reduction="none")
    expected.sum().backward()
    for loss in losses:
        torch.testing.assert_close(loss.double(), expected.detach(), atol=2e-6, rtol=0, equal_nan=True)
    torch.testing.assert_close(grad.double(), x.grad, atol=2e-6, rtol=0, equal_nan=True)
    return grad


@pytest.mark.parametrize("widths", [(8,), (4, 4), (2, 2, 2, 2), (0, 8)], ids=str)
@pytest.mark.parametrize(
    ("row", "target"),
    [
        ([-_INF, -_INF, -_INF, -_INF, 1.0, 2.0, 3.0, 4.0], 6),
        ([1.0, 2.0, 3.0, 4.0, -_INF, -_INF, -_INF, -_INF], 2),
        ([-_INF, 1.0, -_INF, 2.0, -_INF, 3.0, -_INF, 4.0], 1),
        *[([-_INF] * place + [1.5] + [-_INF] * (7 - place), place) for place in range(8)],
    ],
)
def test_masked_logits_have_no_probability(
    subject: Subject, row: list[float], target: int, widths: tuple[int, ...]
) -> None:
    logits = torch.tensor([row])
    grad = _compare(subject, logits, torch.tensor([target]), 0.0, widths)
    assert (grad[logits.to(grad.device) == -_INF] == 0).all()


def test_blocks_of_masked_logits(subject: Subject) -> None:
    # The statistics are made in blocks of 4096: whole blocks are -inf, before, between and after finite ones.
    logits = torch.full((3, 3 * 4096), -_INF)
    logits[0, :100] = torch.linspace(-1, 1, 100)
    logits[1, 5000:5100] = torch.linspace(-1, 1, 100)
    logits[2, -100:] = torch.linspace(-1, 1, 100)
    grad = _compare(subject, logits, torch.tensor([3, 5003, 3 * 4096 - 3]), 0.0, (3 * 4096,))
    assert (grad[logits.to(grad.device) == -_INF] == 0).all()


@pytest.mark.parametrize("widths", [(8,), (4, 4), (3, 0, 5)], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize(
    "row",
    [
        [torch.nan, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        [1.0, 2.0, 3.0, 4.0, 5.0, torch.nan, -_INF, 7.0],
        [torch.nan] * 8,
        [torch.nan] * 4 + [-_INF] * 4,
        [_INF, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, _INF, _INF],
        [-_INF] * 8,
        [-_INF, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        [-_INF] * 4 + [1.0, 2.0, 3.0, 4.0],
    ],
    ids=["nan", "late_nan", "all_nan", "nan_and_masked", "inf", "two_inf", "all_masked", "one_masked", "half_masked"],
)
def test_as_torch_and_for_that_row_alone(
    subject: Subject, row: list[float], alpha: float, widths: tuple[int, ...]
) -> None:
    plain = [0.5, 0.25, 2.0, 1.0, -1.0, 0.0, 0.75, 1.25]
    grad = _compare(subject, torch.tensor([plain, row, plain]), torch.tensor([5, 4, 0]), alpha, widths)
    assert grad[[0, 2]].isfinite().all()


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_a_masked_target_costs_infinity(subject: Subject, alpha: float) -> None:
    logits = torch.tensor([[1.0, -_INF, 2.0, 0.0]])
    _compare(subject, logits, torch.tensor([1]), alpha, (4,))
    _compare(subject, logits, torch.tensor([1]), alpha, (2, 2))


def test_extreme_finite_logits(subject: Subject) -> None:
    for low, high in ((-3e38, 3e38), (-6e4, 6e4)):
        logits = torch.tensor([[low, high, low, 0.0]], device=subject.device).requires_grad_()
        loss = subject.loss(logits, torch.tensor([1], device=subject.device))
        loss.backward()
        assert loss.item() == 0.0
        assert logits.grad.abs().max() < 1e-6


@pytest.mark.parametrize("low", [-_INF, -3.4e38])
@pytest.mark.parametrize(("classes", "alpha"), [(2, 0.5), (2, 0.6), (3, 0.9), (4, 0.75), (4, 0.1)])
@pytest.mark.parametrize("smoothing", ["others", "uniform"])
def test_a_target_out_of_reach_costs_infinity_at_any_smoothing(
    subject: Subject, classes: int, alpha: float, smoothing: str, low: float
) -> None:
    # With "others" the weight of the target's term is 0 or negative from alpha = (V - 1) / V on.
    logits = torch.full((2, classes), 3.4e38 if low > -_INF else 0.0, device=subject.device)
    logits[:, 0] = low
    target = torch.tensor([0, 0], device=subject.device)
    loss = subject.loss(logits, target, label_smoothing=alpha, smoothing=smoothing)
    assert (loss == _INF).all()
