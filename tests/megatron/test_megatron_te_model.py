"""replace_te on a real GPTModel, one rank, no Transformer Engine installed: right numbers, or Megatron's refusal."""

from __future__ import annotations

import megatron_gpt as gpt
import pytest
import torch

import megatron_patch
from megatron_patch import wiring
from te_ce.counters import served

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]


def make_model():
    return gpt.make_model(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")


def check(b, negative):
    """The dense float64 loss to 1e-5, and the parameter gradients of Megatron's unfused loss."""
    model, batch = make_model(), gpt.make_batch(b, 8, negative)
    dense, before = gpt.dense_loss(model, batch), sum(served().values())
    loss, grads = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    assert sum(served().values()) == before + 1
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)
    model.config.cross_entropy_loss_fusion = False
    _, expected = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    for name, grad in grads.items():
        # 2e-6 of the largest entry: float32 rounding through one layer and the head, over 16 rows.
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=2e-6 * float(expected[name].abs().max()))


@pytest.mark.parametrize(("b", "negative"), [(2, ()), (1, ()), (2, (-100, -1))])
def test_served(b, negative):
    megatron_patch.apply(replace_te=True)
    check(b, negative)


@pytest.mark.parametrize("fault", gpt.broken_losses(None))
def test_the_check_rejects_wrong_losses(monkeypatch, fault):
    monkeypatch.setattr(
        wiring, "vocab_parallel_cross_entropy", gpt.broken_losses(wiring.vocab_parallel_cross_entropy)[fault]
    )
    megatron_patch.apply(replace_te=True)
    with pytest.raises(AssertionError, match="not close"):
        check(2, ())


def test_refused_without_the_flag_and_after_revert():
    batch = gpt.make_batch(2, 8)
    for replace_native in (False, True):
        with megatron_patch.patched(replace_native), pytest.raises(RuntimeError, match="TE block"):
            gpt.loss_and_grads(make_model(), batch, gpt.mean)
    with megatron_patch.patched(replace_te=True):
        model = make_model()
        gpt.loss_and_grads(model, batch, gpt.mean)
    with pytest.raises(RuntimeError, match="TE block"):
        gpt.loss_and_grads(model, batch, gpt.mean)
