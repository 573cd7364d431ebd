"""The linear loss, interrupted in a chunk of its walk: hidden states and weight as they were, no gradient of a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_ce import linear_cross_entropy
from te_ce.counters import served
from te_ce.linear import token_walk, vocabulary_walk
from te_ce.reference import gradient, statistics
from tests.faults.interrupting import ERRORS, HOOKS, OUT_OF_MEMORY, raising

_MODES = ["recompute", 1.0, "token_weights"]


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 of 8 columns, or 3 of 2 tokens."""
    monkeypatch.setenv("TE_CE_BACKEND", "torch")
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", "8")
    monkeypatch.setenv("TE_CE_CHUNK_TOKENS", "2")


class _Head:
    """Hidden states [6, 5] and a weight [32, 5], and the gradients of the weighted sum of their losses."""

    def __init__(self, mode: Any) -> None:
        generator = torch.Generator().manual_seed(6)
        self.values = torch.randn(6, 5, generator=generator), torch.randn(32, 5, generator=generator)
        self.leaves = [value.clone().requires_grad_() for value in self.values]
        self.target = torch.tensor([0, 31, 8, 17, -100, 25])
        self.weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 3.0])
        self.mode = mode
        dense = [value.double().requires_grad_() for value in self.values]
        losses = F.cross_entropy(dense[0] @ dense[1].t(), self.target, reduction="none")
        self.expected = torch.autograd.grad((losses * self.weights).sum(), dense)

    def loss(self) -> Tensor:
        if self.mode == "token_weights":
            return linear_cross_entropy(*self.leaves, self.target, token_weights=self.weights, reduction="sum")
        return linear_cross_entropy(*self.leaves, self.target, keep=self.mode)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """By no node but the loss's own."""
        loss.backward(None if loss.ndim == 0 else self.weights, retain_graph=retain_graph)

    def check(self) -> None:
        """The right gradients, once."""
        assert all(torch.equal(leaf, value) for leaf, value in zip(self.leaves, self.values, strict=True))
        for leaf, expected in zip(self.leaves, self.expected, strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad.double(), expected, rtol=0, atol=1e-5)

    def check_untouched(self) -> None:
        assert all(torch.equal(leaf, value) for leaf, value in zip(self.leaves, self.values, strict=True))
        assert all(leaf.grad is None for leaf in self.leaves)


@pytest.mark.parametrize("mode", _MODES)
def test_no_memory_for_the_gradient(mode: Any) -> None:
    head = _Head(mode)
    loss = head.loss()
    with raising(OUT_OF_MEMORY, torch, "empty_like"), pytest.raises(OUT_OF_MEMORY):
        head.backward(loss, retain_graph=True)
    head.check_untouched()
    head.backward(loss, retain_graph=True)
    head.check()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("retain_graph", [False, True], ids=["freed", "retained"])
@pytest.mark.parametrize("hooks", list(HOOKS))
@pytest.mark.parametrize("mode", ["recompute", 1.0, 0.5])
def test_half_way_through_backward(mode: Any, hooks: str, retain_graph: bool, error: type[BaseException]) -> None:
    """Kept logits are overwritten unless the graph is: then a second try raises."""
    head = _Head(mode)
    with HOOKS[hooks]():
        loss = head.loss()
    with raising(error, gradient, "_shard_gradient", 4), pytest.raises(error):
        head.backward(loss, retain_graph)
    head.check_untouched()
    if mode != "recompute" and not retain_graph:
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|overwrites the logits it kept"):
            head.backward(loss)
        head.check_untouched()
        loss = head.loss()
    head.backward(loss)
    head.check()


@pytest.mark.parametrize("hooks", list(HOOKS))
def test_a_retained_second_try_of_logits_that_were_overwritten(hooks: str) -> None:
    """It would overwrite none itself, but what it reads is a gradient."""
    head = _Head(1.0)
    with HOOKS[hooks]():
        loss = head.loss()
    with raising(KeyboardInterrupt, gradient, "_shard_gradient", 4), pytest.raises(KeyboardInterrupt):
        head.backward(loss)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|overwrites the logits it kept"):
        head.backward(loss, retain_graph=True)
    head.check_untouched()


@pytest.mark.parametrize("error", ERRORS)
def test_half_way_through_backward_of_weighted_tokens(error: type[BaseException]) -> None:
    """It multiplies the gradients that forward made: that of hidden states is done when the weight's fails."""
    head = _Head("token_weights")
    loss = head.loss()
    with raising(error, torch, "empty_like", 2), pytest.raises(error):
        head.backward(loss)
    head.check_untouched()
    head.backward(loss)
    head.check()


_STEPS: dict[str, tuple[Any, str, int]] = {
    "logits": (vocabulary_walk, "logits_into", 2),
    "statistics": (statistics, "transform", 2),
    "gradient": (gradient, "_shard_gradient", 2),
    "product": (token_walk, "add_product", 2),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("mode", "step"),
    [(mode, step) for mode in _MODES for step in _STEPS if mode == "token_weights" or step in ("logits", "statistics")],
)
def test_half_way_through_forward(mode: Any, step: str, error: type[BaseException]) -> None:
    head, before = _Head(mode), served()
    with raising(error, *_STEPS[step]), pytest.raises(error):
        head.loss()
    assert served() == before
    head.check_untouched()
    head.backward(head.loss())
    head.check()
    assert sum(served().values()) == sum(before.values()) + 1
