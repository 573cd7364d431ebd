"""A real GPTModel whose step was interrupted: the next is as if nothing had been, and the patch can be taken back."""

from __future__ import annotations

from typing import Any

import fused_head
import pytest
import torch
from torch import Tensor

import megatron_patch
from megatron_patch.scope import current_scope
from te_ce.counters import served
from te_ce.linear import vocabulary_walk
from te_ce.reference import gradient, rows, statistics
from tests.faults.interrupting import ERRORS, raising
from tests.faults.megatron_scenarios import are_same, ask, gpt, own_objects

pytestmark = [pytest.mark.usefixtures("model_world"), pytest.mark.filterwarnings("ignore:::megatron")]

# Where it comes from, by the loss that is asked for: module, function, number of the call; and whether in backward.
_PLACES: dict[tuple[str, str], tuple[Any, str, int, bool]] = {
    ("te_ce", "statistics"): (statistics, "transform", 2, False),
    ("te_ce", "gradient"): (gradient, "_shard_gradient", 2, True),
    ("te_ce_linear", "a chunk in forward"): (vocabulary_walk, "logits_into", 2, False),
    ("te_ce_linear", "a chunk in backward"): (vocabulary_walk, "logits_into", 2, True),
    ("te_ce_linear", "gradient"): (gradient, "_shard_gradient", 3, True),
}


@pytest.fixture(autouse=True)
def many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows of 96 columns: 4 chunks of columns, 4 steps of rows."""
    monkeypatch.setenv("TE_CE_BACKEND", "torch")
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", "24")
    monkeypatch.setattr(rows, "_SLICE_ELEMENTS", 4 * gpt.VOCAB)


def _bits(model: Any) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("implementation", "place"), list(_PLACES))
def test_a_step_is_interrupted(implementation: str, place: str, error: type[BaseException]) -> None:
    module, function, call, in_backward = _PLACES[implementation, place]
    model, batch, own = gpt.make_model(), gpt.make_batch(2, 8), own_objects()
    before, dense = _bits(model), gpt.dense_loss(model, batch)
    _, expected = gpt.loss_and_grads(model, batch, gpt.mean)
    model.zero_grad(set_to_none=True)
    with megatron_patch.patched(strict=True):
        ask(model, implementation)
        count = sum(served().values())
        if in_backward:
            loss = gpt.forward(model, batch, batch.labels).mean()
            with raising(error, module, function, call), pytest.raises(error):
                loss.backward()
            del loss
        else:
            with raising(error, module, function, call), pytest.raises(error):
                gpt.forward(model, batch, batch.labels)
        assert current_scope() is None
        assert sum(served().values()) == count + in_backward
        assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
        assert all(each.grad is None for each in model.parameters())

        loss, grads = gpt.loss_and_grads(model, batch, gpt.mean)
        torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            bound = 2e-6 * float(expected[name].abs().max())
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=bound)
        fused = implementation == "te_ce_linear"
        assert megatron_patch.status().heads == ({"fused": 1 + in_backward} if fused else {})
        assert not are_same(own, own_objects())
    assert are_same(own, own_objects())
    model.config.cross_entropy_loss_fusion = False
    torch.testing.assert_close(gpt.forward(model, batch, batch.labels).double(), dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["te_ce", "te_ce_linear"])
def test_the_other_loss_after_an_interrupt(implementation: str) -> None:
    """The one that was not interrupted, in the same model and application of the patch."""
    other = {"te_ce": "te_ce_linear", "te_ce_linear": "te_ce"}[implementation]
    model, batch = gpt.make_model(), gpt.make_batch(2, 8)
    dense = gpt.dense_loss(model, batch)
    with megatron_patch.patched(strict=True):
        ask(model, implementation)
        with raising(KeyboardInterrupt, statistics, "transform", 2), pytest.raises(KeyboardInterrupt):
            gpt.forward(model, batch, batch.labels)
        loss = gpt.forward(ask(model, other), batch, batch.labels)
        loss.sum().backward()
        torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)
        assert current_scope() is None


def test_main_grad_half_added() -> None:
    """A second try would add the first chunks again; after a reset a new step is right."""
    model, batch = ask(gpt.make_model(), "te_ce_linear"), gpt.make_batch(2, 8)
    with megatron_patch.patched(strict=True), fused_head.fused_accumulation(model):
        expected = fused_head.main_grads(model, [batch], gpt.mean)
        expected = {name: grad.clone() for name, grad in expected.items()}
        weight = model.output_layer.weight
        weight.main_grad = torch.zeros_like(weight)
        loss = gpt.forward(model, batch, batch.labels).mean()
        with raising(KeyboardInterrupt, gradient, "_shard_gradient", 2), pytest.raises(KeyboardInterrupt):
            loss.backward()
        assert weight.main_grad[:24].any(), "nothing was added before: the interrupt came too early for this test"
        assert not weight.main_grad[24:].any()
        with pytest.raises(RuntimeError, match="interrupted in backward, which adds to the weight's gradient"):
            loss.backward()
        fused_head.check_grads(fused_head.main_grads(model, [batch], gpt.mean), expected)
