"""The gradient that arrives at the loss: any value per row, any strides, the rows' own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions
from tests.support.bounds import check_gradient
from tests.support.dense import dense
from tests.support.subject import Subject

_WEIGHTS = torch.tensor([[1.0, -2.0], [3.0, 0.5], [0.0, 6.0]])


def _draw(subject: Subject) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 2, 16, generator=random).to(subject.device).requires_grad_()
    return logits, torch.randint(16, (3, 2), generator=random).to(subject.device)


def _column_major(g: Tensor) -> Tensor:
    return g.t().contiguous().t()


def _inner_of_wider(g: Tensor) -> Tensor:
    wide = torch.full((3, 4), torch.nan, device=g.device)
    wide[:, 1:3] = g
    return wide[:, 1:3]


@pytest.mark.parametrize(
    "layout",
    [
        lambda g: g.contiguous(),
        _column_major,  # Megatron's: [s, b] with strides (1, s)
        _inner_of_wider,
        lambda g: g[:1].expand(3, 2),  # strides (0, 1)
        lambda g: g[:, :1].expand(3, 2),  # strides (1, 0)
        lambda g: g[:1, :1].expand(3, 2),  # strides (0, 0)
        lambda g: torch.ones_like(g),
        lambda g: torch.zeros_like(g),
    ],
    ids=["dense", "transposed", "sliced", "expanded_rows", "expanded_columns", "expanded", "ones", "zeros"],
)
def test_any_layout_of_the_gradient(subject: Subject, layout: Callable[[Tensor], Tensor]) -> None:
    logits, target = _draw(subject)
    g = layout(_WEIGHTS.to(subject.device))
    torch.autograd.backward(subject.loss(logits, target), g)
    truth = dense(logits, target, LossOptions(), g)
    check_gradient(logits.grad, truth, logits, target, LossOptions(), g, 0.5)


def test_ones_equal_the_sum_bit_for_bit(subject: Subject) -> None:
    logits, target = _draw(subject)
    (by_sum,) = torch.autograd.grad(subject.loss(logits, target).sum(), logits)
    (by_ones,) = torch.autograd.grad(subject.loss(logits, target), logits, torch.ones(3, 2, device=subject.device))
    assert torch.equal(by_sum, by_ones)


def test_masked_transposed_and_averaged_losses(subject: Subject) -> None:
    logits, target = _draw(subject)
    w = _WEIGHTS.to(subject.device)
    reductions: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda loss: (loss * w).sum(), w),
        (lambda loss: (loss.transpose(0, 1).contiguous() * w.t()).sum(), w),
        (lambda loss: loss.mean(), torch.full_like(w, 1 / 6)),
        (lambda loss: loss[0, 0] * 0.5, torch.tensor([[0.5, 0], [0, 0], [0, 0]], device=subject.device)),
    ]
    for reduce, g in reductions:
        (grad,) = torch.autograd.grad(reduce(subject.loss(logits, target)), logits)
        check_gradient(grad, dense(logits, target, LossOptions(), g), logits, target, LossOptions(), g, 0.5)


def test_a_masked_first_row_masks_no_other(subject: Subject) -> None:
    random = torch.Generator().manual_seed(6)
    logits = torch.randn(6, 12, generator=random).to(subject.device).requires_grad_()
    target = torch.randint(12, (6,), generator=random).to(subject.device)
    g = torch.tensor([0.0, 1.0, 0.5, -2.0, 1.0, 1.0], device=subject.device)
    (grad,) = torch.autograd.grad(subject.loss(logits, target), logits, g)
    check_gradient(grad, dense(logits, target, LossOptions(), g), logits, target, LossOptions(), g, 0.5)
    assert (grad[0] == 0).all()
    assert grad[1:].abs().amax(-1).min() > 0.01


def test_one_row_and_a_single_one(subject: Subject) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(7)).to(subject.device).requires_grad_()
    target = torch.tensor([4], device=subject.device)
    g = torch.ones(1, device=subject.device)
    (grad,) = torch.autograd.grad(subject.loss(logits, target), logits, g)
    check_gradient(grad, dense(logits, target, LossOptions(), g), logits, target, LossOptions(), g, 0.5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_ignored_rows_have_no_gradient_whatever_arrives(subject: Subject, value: float) -> None:
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(9)).to(subject.device).requires_grad_()
    target = torch.tensor([-100, 3], device=subject.device)
    g = torch.tensor([value, 1.0], device=subject.device)
    (grad,) = torch.autograd.grad(subject.loss(logits, target), logits, g)
    assert (grad[0] == 0).all()
    assert grad[1].isfinite().all()


@pytest.mark.parametrize("kind", ["negated", "sparse", "zero"])
def test_gradients_that_are_not_plain_memory(subject: Subject, kind: str) -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(3)).to(subject.device).requires_grad_()
    target = torch.arange(5, device=subject.device)
    values = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], device=subject.device)
    g = {
        "negated": lambda: torch._neg_view(values),
        "sparse": lambda: values.to_sparse(),
        "zero": lambda: torch._efficientzerotensor(5, device=subject.device),
    }[kind]()
    expected = {"negated": -values, "sparse": values, "zero": torch.zeros_like(values)}[kind]
    (plain,) = torch.autograd.grad(subject.loss(logits, target), logits, expected)

    class Upstream(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
            return loss.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
            return g

    (grad,) = torch.autograd.grad(Upstream.apply(subject.loss(logits, target)).sum(), logits)
    assert torch.equal(grad, plain)
