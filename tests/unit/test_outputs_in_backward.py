"""One backward of the logits, whatever subset of the outputs gets a gradient, and when it may overwrite them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, vocab_parallel_log_probs
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.bounds import check_gradient
from tests.support.dense import dense
from tests.support.subject import Subject
from tests.unit.test_inplace import Model

_DIFFERENTIABLE = ("loss", "log_probs", "entropy", "lse")


def _counting(subject: Subject) -> tuple[Subject, list[int]]:
    """The subject, and a list that grows with every gradient of the logits that it makes."""
    made: list[int] = []

    def logits_gradient(*arguments: Any) -> None:
        made.append(1)
        subject.backend.logits_gradient(*arguments)

    backend = subject.backend._replace(logits_gradient=logits_gradient)
    return dataclasses.replace(subject, backend=backend), made


def _leaf(subject: Subject, rows: int = 4, columns: int = 9) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(13)
    logits = torch.randn(rows, columns, generator=random).to(subject.device).requires_grad_()
    return logits, torch.randint(columns, (rows,), generator=random).to(subject.device)


def _check(subject: Subject, grad: Tensor, logits: Tensor, target: Tensor, **weights: float) -> None:
    """`grad` is that of the sum of the named values, each times its weight."""
    grads = OutputGrads(*(torch.full(target.shape, weights[n]) if n in weights else None for n in OutputGrads._fields))
    truth = dense(logits, target, LossOptions(), grads)
    check_gradient(grad, truth, logits, target, LossOptions(), grads, subject.allowed_ulps(logits.dtype))


@pytest.mark.parametrize("used", range(1, 16))
def test_one_gradient_for_any_subset(subject: Subject, used: int) -> None:
    counted, made = _counting(subject)
    logits, target = _leaf(subject)
    got = counted.loss(logits, target, outputs=OUTPUTS)
    weights = {name: 0.5 + bit for bit, name in enumerate(_DIFFERENTIABLE) if used >> bit & 1}
    total = sum(weight * getattr(got, name).sum() for name, weight in weights.items())
    assert isinstance(total, Tensor)
    total.backward()
    assert made == [1]
    _check(subject, logits.grad, logits, target, **weights)


def test_values_for_logging_cost_no_gradient(subject: Subject) -> None:
    counted, made = _counting(subject)
    logits, target = _leaf(subject)
    got = counted.loss(logits, target, outputs=OUTPUTS)
    for name in ("z_loss", "predictions"):
        with pytest.raises(RuntimeError, match="does not require grad"):
            getattr(got, name).sum().backward()
    assert made == []
    assert logits.grad is None


@pytest.mark.parametrize("used", [("loss",), ("entropy",), ("log_probs", "entropy"), _DIFFERENTIABLE], ids="+".join)
def test_dropped_logits_are_taken_over(subject: Subject, used: tuple[str, ...]) -> None:
    model = Model(subject)
    got = model.loss(model.logits(), outputs=OUTPUTS)
    sum(getattr(got, name).sum() for name in used).backward()  # type: ignore[union-attr]
    assert model.seen["taken"]
    _check(subject, model.seen["grad"], model.values, model.target, **dict.fromkeys(used, 1.0))


@pytest.mark.parametrize("inplace", ["auto", False])
def test_kept_logits_are_untouched(subject: Subject, inplace: Any) -> None:
    model = Model(subject)
    logits = model.logits()
    before = logits.detach().clone()
    got = model.loss(logits, outputs=OUTPUTS, inplace=inplace)
    (got.loss.sum() + got.entropy.sum()).backward()
    assert not model.seen["taken"]
    assert torch.equal(logits, before)
    _check(subject, model.seen["grad"], model.values, model.target, loss=1.0, entropy=1.0)


def test_true_overwrites_and_refuses_a_second_backward(subject: Subject) -> None:
    logits, target = _leaf(subject)
    x = logits * 1.0
    got = subject.loss(x, target, outputs=["entropy"], inplace=True)
    got.entropy.sum().backward(retain_graph=True)
    _check(subject, x, logits, target, entropy=1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.loss.sum().backward()


def test_separate_backwards_of_two_outputs(subject: Subject) -> None:
    model = Model(subject)
    got = model.loss(model.logits(), outputs=["entropy"])
    got.loss.sum().backward(retain_graph=True)
    subject.let_go()
    assert not model.seen["taken"]
    _check(subject, model.seen["grad"], model.values, model.target, loss=1.0)
    got.entropy.sum().backward()
    assert model.seen["taken"]
    _check(subject, model.seen["grad"], model.values, model.target, entropy=1.0)
    with pytest.raises(RuntimeError, match="second time"):
        got.loss.sum().backward()


def test_outputs_changed_in_place(subject: Subject) -> None:
    logits, target = _leaf(subject)
    got = subject.loss(logits, target, outputs=OUTPUTS)
    got.loss.mul_(2.0)
    got.log_probs.neg_()
    with torch.no_grad():
        got.lse.zero_()
        got.entropy.zero_()
        got.z_loss.fill_(7.0)
        got.predictions.zero_()
    (got.loss.sum() + got.log_probs.sum() + got.entropy.sum()).backward()
    _check(subject, logits.grad, logits, target, loss=2.0, log_probs=-1.0, entropy=1.0)


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_any_layout_of_the_gradients(subject: Subject, layout: str) -> None:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 8, generator=random).to(subject.device).requires_grad_()
    target = torch.randint(8, (2, 3), generator=random).to(subject.device)
    got = subject.loss(logits, target, outputs=OUTPUTS)
    if layout == "expanded":
        grads = OutputGrads(*(torch.tensor(0.5 + n).to(logits).expand(2, 3) for n in range(4)))
    else:
        grads = OutputGrads(*(torch.randn(3, 2, generator=random).to(logits).t() for _ in range(4)))
    torch.autograd.backward([getattr(got, name) for name in OutputGrads._fields], list(grads))
    truth = dense(logits, target, LossOptions(), grads)
    check_gradient(logits.grad, truth, logits, target, LossOptions(), grads, subject.allowed_ulps(logits.dtype))


def test_a_second_derivative_is_refused(subject: Subject) -> None:
    logits, target = _leaf(subject)
    got = subject.loss(logits, target, outputs=["entropy"])
    (grad,) = torch.autograd.grad(got.entropy.sum() + got.loss.sum(), logits, create_graph=True)
    _check(subject, grad, logits, target, loss=1.0, entropy=1.0)
    with pytest.raises(RuntimeError, match="differentiated again"):
        grad.sum().backward()


@pytest.mark.parametrize("entropy_first", [False, True])
def test_log_probs_and_entropy_in_either_order(subject: Subject, entropy_first: bool) -> None:
    """Two calls on the same logits, and one call for both: neither sees what the other did."""
    logits, target = _leaf(subject, 4, 8)
    x = logits * 1.0
    before = x.detach().clone()

    def values(name: str) -> Tensor:
        with subject.serving():
            if name == "log_probs":
                return vocab_parallel_log_probs(x, target)
            return vocab_parallel_log_probs(x, target, entropy=True)[1]

    order = ["entropy", "log_probs"] if entropy_first else ["log_probs", "entropy"]
    got = {name: values(name) for name in order}
    assert torch.equal(x, before)
    assert x._version == 0
    with subject.serving():
        both = vocab_parallel_log_probs(x, target, entropy=True)
    assert torch.equal(both[0], got["log_probs"])
    assert torch.equal(both[1], got["entropy"])
    (got["log_probs"].sum() - 0.01 * got["entropy"].sum()).backward()
    assert torch.equal(x, before)
    _check(subject, logits.grad, logits, target, log_probs=1.0, entropy=-0.01)
