"""Loss and gradient of every case against float64, and proof that these checks refuse wrong answers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.bounds import check_gradient, check_loss
from tests.support.broken import BROKEN, rounded_twice
from tests.support.cases import CASES, Case
from tests.support.dense import dense
from tests.support.subject import Subject


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradient_match_float64(subject: Subject, case: Case) -> None:
    logits, target, g = case.draw(subject.device)
    truth = dense(logits, target, case.options, g)
    losses, grad = subject.run_shards(logits, target, g, case.options, case.widths)
    for loss in losses:
        check_loss(loss, truth)
        assert torch.equal(loss, losses[0]), "ranks disagree"
    check_gradient(grad, truth, logits, target, case.options, g, subject.allowed_ulps(case.dtype))


@pytest.mark.parametrize("case", [case for case in CASES if len(case.widths) == 1], ids=str)
def test_public_function_matches_float64(subject: Subject, case: Case) -> None:
    logits, target, g = case.draw(subject.device)
    truth = dense(logits, target, case.options, g)
    logits.requires_grad_()
    loss = subject.loss(logits, target, options=case.options)
    assert loss.shape == target.shape
    assert loss.dtype == torch.float32
    (grad,) = torch.autograd.grad(loss, logits, g)
    assert grad.shape == logits.shape
    assert grad.dtype == logits.dtype
    check_loss(loss, truth)
    check_gradient(grad, truth, logits, target, case.options, g, subject.allowed_ulps(case.dtype))


def _applies(broken: str, case: Case) -> bool:
    return case.is_smoothed_shard if broken == "smoothing_over_the_shard" else True


@pytest.mark.parametrize(
    ("broken", "case"),
    [(broken, case) for broken in BROKEN for case in CASES if _applies(broken, case)],
    ids=str,
)
def test_a_broken_loss_is_refused(subject: Subject, broken: str, case: Case) -> None:
    wrong = dataclasses.replace(subject, backend=BROKEN[broken](subject.backend))
    with pytest.raises(AssertionError):
        test_loss_and_gradient_match_float64(wrong, case)
    if len(case.widths) == 1:
        with pytest.raises(AssertionError):
            test_public_function_matches_float64(wrong, case)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != torch.float32], ids=str)
def test_a_second_rounding_is_refused(subject: Subject, case: Case) -> None:
    wrong = dataclasses.replace(subject, backend=rounded_twice(subject.backend))
    with pytest.raises(AssertionError):
        test_loss_and_gradient_match_float64(wrong, case)
