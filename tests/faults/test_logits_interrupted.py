"""The loss on logits, interrupted: logits that are not the loss's to overwrite keep their bits, and nothing wrong is
handed on later.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_ce import vocab_parallel_cross_entropy
from te_ce.counters import served
from te_ce.reference import gradient, rows, statistics
from tests.faults.interrupting import ERRORS, HOOKS, OUT_OF_MEMORY, raising


@pytest.fixture(autouse=True)
def two_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin walks 6 rows in three steps, so that one can be interrupted between them."""
    monkeypatch.setenv("TE_CE_BACKEND", "torch")
    monkeypatch.setattr(rows, "_SLICE_ELEMENTS", 2 * 8)


class _Step:
    """A parameter [6, 8], logits made of it, and the gradient of the sum of their losses as it should be."""

    def __init__(self) -> None:
        self.values = torch.randn(6, 8, generator=torch.Generator().manual_seed(5))
        self.parameter = self.values.clone().requires_grad_()
        self.target = torch.tensor([0, 7, 3, -100, 2, 5])
        dense = self.values.double().requires_grad_()
        (self.expected,) = torch.autograd.grad(F.cross_entropy(dense, self.target, reduction="sum"), dense)

    def logits(self) -> Tensor:
        return self.parameter * 1

    def loss(self, logits: Tensor, inplace: Any, outputs: bool = False) -> Tensor:
        names = ["lse"] if outputs else []
        loss = vocab_parallel_cross_entropy(logits, self.target, inplace=inplace, outputs=names)
        return loss if isinstance(loss, Tensor) else loss.loss

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.sum().backward(retain_graph=retain_graph)

    def check(self) -> None:
        """The right gradient, once, and a parameter as it was."""
        assert torch.equal(self.parameter, self.values)
        assert self.parameter.grad is not None
        torch.testing.assert_close(self.parameter.grad.double(), self.expected, rtol=0, atol=1e-6)

    def check_untouched(self) -> None:
        assert torch.equal(self.parameter, self.values)
        assert self.parameter.grad is None


@pytest.mark.parametrize("outputs", [False, True], ids=["loss", "outputs"])
@pytest.mark.parametrize("inplace", [False, "auto"])
def test_no_memory_for_the_gradient(inplace: Any, outputs: bool) -> None:
    step = _Step()
    logits = step.logits()
    loss = step.loss(logits, inplace, outputs)
    with raising(OUT_OF_MEMORY, torch, "empty_like"), pytest.raises(OUT_OF_MEMORY):
        step.backward(loss, retain_graph=True)
    assert torch.equal(logits, step.values)
    step.check_untouched()
    step.backward(loss, retain_graph=True)
    step.check()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("retain_graph", [False, True], ids=["freed", "retained"])
@pytest.mark.parametrize("inplace", [False, "auto"])
def test_half_way_through_a_gradient_of_its_own(inplace: Any, retain_graph: bool, error: type[BaseException]) -> None:
    step = _Step()
    logits = step.logits()
    loss = step.loss(logits, inplace)
    with raising(error, gradient, "_shard_gradient", 2), pytest.raises(error):
        step.backward(loss, retain_graph)
    assert torch.equal(logits, step.values)
    step.check_untouched()
    step.backward(loss)
    step.check()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("outputs", [False, True], ids=["loss", "outputs"])
@pytest.mark.parametrize(
    ("inplace", "hooks"), [("auto", "none"), (True, "none"), (True, "identity"), (True, "save_on_cpu")]
)
def test_half_way_through_logits_that_are_overwritten(
    inplace: Any, hooks: str, outputs: bool, error: type[BaseException]
) -> None:
    """A second try has nothing to make the gradient of."""
    step = _Step()
    with HOOKS[hooks]():
        loss = step.loss(step.logits(), inplace, outputs)
    with raising(error, gradient, "_shard_gradient", 2), pytest.raises(error):
        step.backward(loss)
    step.check_untouched()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|overwrote its logits"):
        step.backward(loss)
    step.check_untouched()
    step.backward(step.loss(step.logits(), inplace, outputs))
    step.check()


@pytest.mark.parametrize("outputs", [False, True], ids=["loss", "outputs"])
@pytest.mark.parametrize("hooks", list(HOOKS))
def test_a_second_backward_of_logits_that_were_overwritten(hooks: str, outputs: bool) -> None:
    """Also where hooks have what is saved: nobody compares its version there."""
    step = _Step()
    with HOOKS[hooks]():
        loss = step.loss(step.logits(), True, outputs)
    step.backward(loss, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|overwrote its logits"):
        step.backward(loss)
    step.check()


@pytest.mark.parametrize("hooks", list(HOOKS))
def test_half_way_under_hooks_the_ownership_is_still_told(hooks: str) -> None:
    """The graph is to be used again, so its logits are left alone, whoever has them."""
    step = _Step()
    with HOOKS[hooks]():
        loss = step.loss(step.logits(), "auto")
    with raising(KeyboardInterrupt, gradient, "_shard_gradient", 2), pytest.raises(KeyboardInterrupt):
        step.backward(loss, retain_graph=True)
    step.backward(loss)
    step.check()


@pytest.mark.parametrize("retain_graph", [False, True], ids=["freed", "retained"])
@pytest.mark.parametrize("outputs", [False, True], ids=["loss", "outputs"])
@pytest.mark.parametrize("hooks", list(HOOKS))
def test_a_second_try_is_right_or_raises(hooks: str, outputs: bool, retain_graph: bool) -> None:
    """Whether the first one had overwritten its logits is the loss's own choice, and hooks may be all that saw them."""
    step = _Step()
    with HOOKS[hooks]():
        loss = step.loss(step.logits(), "auto", outputs)
    with raising(KeyboardInterrupt, gradient, "_shard_gradient", 2), pytest.raises(KeyboardInterrupt):
        step.backward(loss)
    refusal = None
    try:
        step.backward(loss, retain_graph)
    except RuntimeError as error:
        refusal = str(error)
    if refusal is None:
        step.check()
    else:
        assert re.search(r"modified by an inplace operation|overwrote its logits", refusal)
        step.check_untouched()


@pytest.mark.parametrize("error", ERRORS)
def test_half_way_through_forward(error: type[BaseException]) -> None:
    step = _Step()
    logits, before = step.logits(), served()
    with raising(error, statistics, "transform", 2), pytest.raises(error):
        step.loss(logits, True)
    assert served() == before
    assert torch.equal(logits, step.values)
    step.backward(step.loss(logits, True))
    step.check()
    assert sum(served().values()) == sum(before.values()) + 1
