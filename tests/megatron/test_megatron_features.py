"""What people switch on besides: recomputation, deterministic mode, losses per token, acceptance rates; and BERT.

For each: the numbers of Megatron's own loss, and how many losses te_ce has served, on logits and fused.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import megatron_gpt as gpt
import pytest
import torch
from fused_head import ask, check_grads, heads
from torch import Tensor

import megatron_patch
from te_ce.counters import served
from tests.support import cpu_cuda

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]

VALUES = ["te_ce", "te_ce_linear"]


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    """Megatron's checkpointed layers and MTP heads ask for CUDA's random states and devices."""
    with cpu_cuda.installed(), gpt.without_cuda():
        yield


def ask_for(model: Any, value: str) -> Any:
    """The model, whose configuration now asks for `value`."""
    ask(model).config.cross_entropy_fusion_impl = value
    return model


def check_served(value: str, before: int, losses: int) -> None:
    """Exactly so many losses since `before`, all of them by the path that `value` stands for."""
    assert sum(served().values()) - before == losses
    assert heads() == ({"fused": losses} if value == "te_ce_linear" else {})


def check_same(model: Any, value: str, losses: int = 1, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of Megatron's unfused loss, from `losses` losses of ours; returns ours."""
    batch = gpt.make_batch(2, 8, (-100, -1))
    expected, expected_grads = gpt.loss_and_grads(model, batch, gpt.masked_sum, **arguments)
    megatron_patch.apply(strict=True)
    before = sum(served().values())
    loss, grads = gpt.loss_and_grads(ask_for(model, value), batch, gpt.masked_sum, **arguments)
    check_served(value, before, losses)
    torch.testing.assert_close(loss * batch.mask, expected * batch.mask, rtol=0, atol=1e-5)
    check_grads(grads, expected_grads)
    return loss, grads


RECOMPUTE = {
    "full, uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "full, block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective"},
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("how", RECOMPUTE.values(), ids=RECOMPUTE)
def test_activation_recompute(how: dict[str, Any], value: str) -> None:
    """The layers run twice, the loss once."""
    model = gpt.make_model(num_layers=2, **how)
    calls = []
    model.decoder.layers[0].self_attention.core_attention.register_forward_pre_hook(lambda *_: calls.append(1))
    check_same(model, value)
    assert len(calls) == 4  # two forwards, each of them twice


@pytest.mark.parametrize("value", VALUES)
def test_deterministic_mode(value: str) -> None:
    """Megatron bars its own fused losses from it; a second run has the same bits."""
    batch = gpt.make_batch(2, 8, (-100, -1))
    model = gpt.make_model(deterministic_mode=True)
    torch.use_deterministic_algorithms(True)
    try:
        loss, grads = check_same(model, value)
        again, grads_again = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(again, loss)
    assert all(torch.equal(grads_again[name], grad) for name, grad in grads.items())


@gpt.needs_mtp
@pytest.mark.parametrize("value", VALUES)
def test_the_loss_per_token(value: str) -> None:
    """Heads of multi-token prediction scale their losses otherwise then."""
    batch = gpt.make_batch(2, 8, (-100, -1))
    models = [gpt.make_model(mtp_num_layers=2, calculate_per_token_loss=per_token) for per_token in (True, False)]
    _, grads = check_same(models[0], value, losses=3, loss_mask=batch.mask)
    _, others = gpt.loss_and_grads(ask_for(models[1], value), batch, gpt.masked_sum, loss_mask=batch.mask)
    assert any((grads[name] - others[name]).abs().max() > 1e-3 for name in grads)


@gpt.needs_mtp
@pytest.mark.parametrize("value", VALUES)
def test_acceptance_rates(value: str) -> None:
    """Megatron counts, from the logits and after their loss, how often a head predicts the label."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Helper

    if not hasattr(Helper, "save_metrics_to_tracker"):
        pytest.skip("this release counts none")
    model, batch = gpt.make_model(mtp_num_layers=2).train(), gpt.make_batch(2, 8)
    labels = predicted(model, batch)
    batch = gpt.Batch(batch.tokens, labels, batch.mask)

    def counted() -> tuple[Tensor, Tensor]:
        Helper.tracker.clear()
        gpt.loss_and_grads(model, batch, gpt.masked_sum, loss_mask=batch.mask)
        return Helper.tracker["correct_values"].clone(), Helper.tracker["total_values"].clone()

    expected = counted()
    assert (expected[0] > 0).all()
    megatron_patch.apply(strict=True)
    before = sum(served().values())
    ask_for(model, value)
    found = counted()
    check_served(value, before, 3)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def predicted(model: Any, batch: gpt.Batch) -> Tensor:
    """Labels that either head gets right now and then: what it predicts, rolled to where it looks for it."""
    logits: list[Tensor] = []
    handle = model.output_layer.register_forward_hook(lambda _, __, output: logits.append(output[0].detach()))
    try:
        gpt.forward(model, batch, batch.labels, loss_mask=batch.mask)
    finally:
        handle.remove()
    # Logits are [s, b, V], the heads' before the model's own; head number d is asked for the label d places on.
    first, second = (each.argmax(dim=-1).t() for each in logits[:2])
    labels = batch.labels.clone()
    labels[0, 1:] = first[0, :-1]
    labels[1, 2:] = second[1, :-2]
    return labels


def bert() -> Any:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        from megatron.core.models.bert import bert_layer_specs
        from megatron.core.models.bert.bert_model import BertModel

        # It compares the version of Transformer Engine, which is not there.
        patch.setattr(BertModel, "_sanity_check_attention_and_get_attn_mask_dimension", lambda _: "b1ss", raising=False)
        spec = bert_layer_specs.bert_layer_local_spec
        spec.submodules.self_attention.submodules.core_attention = gpt.PlainAttention
        config = gpt.make_config()
        pooling = {"add_binary_head": False} if "add_binary_head" in inspect.signature(BertModel).parameters else {}
        model = BertModel(
            config=config,
            num_tokentypes=0,
            transformer_layer_spec=spec,
            vocab_size=gpt.VOCAB,
            max_sequence_length=32,
            share_embeddings_and_output_weights=True,
            **pooling,
        )
    with torch.no_grad():
        model.output_layer.bias.normal_()
    return gpt.enlarge(model)


@pytest.mark.parametrize("value", VALUES)
def test_bert(value: str) -> None:
    """Its output layer has a bias, and its loss looks at few of the rows."""
    torch.manual_seed(0)
    model, batch = bert(), gpt.make_batch(2, 8, (-1,) * 10)
    mask = torch.ones(2, 8, dtype=torch.bool)

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        loss, _ = model(batch.tokens, mask, lm_labels=batch.labels)
        gpt.masked_sum(loss, batch.mask).backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, expected_grads = run()
    megatron_patch.apply(strict=True)
    before = sum(served().values())
    ask_for(model, value)
    loss, grads = run()
    check_served(value, before, 1)
    assert (batch.mask == 0).sum() == 10
    torch.testing.assert_close(loss * batch.mask, expected * batch.mask, rtol=0, atol=1e-5)
    check_grads(grads, expected_grads)
    assert grads["output_layer.bias"].any()
