"""`te_ce_linear` on a real GPTModel, one rank: right numbers, the right parameter's gradient, and no logits."""

from __future__ import annotations

import megatron_gpt as gpt
import pytest
import torch
from fused_head import ask, broken_linear_losses, check_grads, heads

import megatron_patch
from megatron_patch import linear
from te_ce import LossOptions

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]

HAS_MUP = hasattr(gpt.TransformerConfig, "use_mup")


def check_against_megatron(model, batch, reduce):
    """Fused: the dense float64 loss to 1e-5, and the parameter gradients of Megatron's unfused loss on logits."""
    _, expected = gpt.loss_and_grads(model, batch, reduce)
    dense = gpt.dense_loss(model, batch)
    before = heads().get("fused", 0)
    loss, grads = gpt.loss_and_grads(ask(model), batch, reduce)
    assert heads() == {"fused": before + 1}
    assert loss.dtype == torch.float32
    assert loss.is_contiguous()
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)
    assert (loss[batch.labels < 0] == 0).all()
    check_grads(grads, expected)


BATCHES = {
    "plain": (2, 8, ()),
    "one sequence": (1, 8, ()),
    "one token": (2, 1, ()),
    "ignored": (2, 8, (-100, -1, -7)),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("b", "s", "negative"), BATCHES.values(), ids=BATCHES)
def test_fused(b, s, negative, tied):
    megatron_patch.apply(strict=True)
    model, batch = gpt.make_model(tied=tied), gpt.make_batch(b, s, negative)
    labels = batch.labels.clone()
    check_against_megatron(model, batch, gpt.masked_sum)
    assert torch.equal(batch.labels, labels)


def test_mean():  # its gradient arrives at the loss expanded
    megatron_patch.apply()
    check_against_megatron(gpt.make_model(), gpt.make_batch(2, 8), gpt.mean)


@pytest.mark.parametrize("fault", broken_linear_losses(None))
def test_the_checks_reject_wrong_losses(monkeypatch, fault):
    real = linear.linear_cross_entropy_into
    monkeypatch.setattr(linear, "linear_cross_entropy_into", broken_linear_losses(real)[fault])
    megatron_patch.apply()
    with pytest.raises(AssertionError):
        check_against_megatron(gpt.make_model(), gpt.make_batch(2, 8), gpt.masked_sum)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_which_parameter_is_trained(tied):
    """Untied weights with values that differ: the output layer's own. Tied: the embedding's, on top of its own use."""
    megatron_patch.apply()
    model, batch = ask(gpt.make_model(tied=tied)), gpt.make_batch(2, 8)
    loss, grads = gpt.loss_and_grads(model, batch, gpt.mean)
    unused = sorted(set(range(gpt.VOCAB)) - set(batch.tokens.flatten().tolist()))
    embedding = grads["embedding.word_embeddings.weight"]
    # Only the head reaches the rows of tokens that are no input.
    assert bool(embedding[unused].any()) == tied
    assert ("output_layer.weight" in grads) == (not tied)
    torch.testing.assert_close(loss.double(), gpt.dense_loss(model, batch), rtol=0, atol=1e-5)


def test_frozen_output_layer():
    megatron_patch.apply()
    model = gpt.make_model()
    model.output_layer.weight.requires_grad_(False)
    check_against_megatron(model, gpt.make_batch(2, 8), gpt.masked_sum)
    assert model.output_layer.weight.grad is None


def test_two_micro_batches():
    """The gradients add up, also where both forwards come before both backwards, as in a pipeline."""
    megatron_patch.apply()
    model, batches = gpt.make_model(tied=True), [gpt.make_batch(2, 8, seed=seed) for seed in (1, 2)]
    expected = {}
    for batch in batches:
        for name, grad in gpt.loss_and_grads(model, batch, gpt.mean)[1].items():
            expected[name] = expected.get(name, 0) + grad
    ask(model).zero_grad(set_to_none=True)
    losses = [gpt.forward(model, batch, batch.labels).mean() for batch in batches]
    for loss in losses:
        loss.backward()
    check_grads({name: p.grad for name, p in model.named_parameters()}, expected)
    assert heads() == {"fused": 2}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_with_labels(mode):
    megatron_patch.apply(strict=True)
    model, batch = ask(gpt.make_model()).eval(), gpt.make_batch(2, 8, (-100,))
    with mode():
        loss = gpt.forward(model, batch, batch.labels)
    assert not loss.requires_grad
    assert heads() == {"fused": 1}
    torch.testing.assert_close(loss.double(), gpt.dense_loss(model, batch), rtol=0, atol=1e-5)


@pytest.mark.parametrize("smoothing", ["uniform", "others"])
def test_options_reach_the_loss(smoothing):
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8, (-100,))
    megatron_patch.apply(options=LossOptions(label_smoothing=0.2, smoothing=smoothing, ignore_index=-5))
    loss, _ = gpt.loss_and_grads(model, batch, gpt.mean)
    assert heads() == {"fused": 1}
    alpha = 0.2 if smoothing == "others" else 0.2 * (gpt.VOCAB - 1) / gpt.VOCAB
    logits = gpt.forward(model, batch, None)
    torch.testing.assert_close(loss.double(), gpt.dense_cross_entropy(logits, batch.labels, alpha), rtol=0, atol=1e-5)
    assert (loss.double() - gpt.dense_cross_entropy(logits, batch.labels)).abs().max() > 0.01


@pytest.mark.parametrize("keep", [1.0, 1 << 21])
def test_keep_reaches_the_loss(keep):
    """Kept logits are seen among what the graph saves."""
    model, batch, saved = ask(gpt.make_model()), gpt.make_batch(2, 8), []
    with megatron_patch.patched():
        _, expected = gpt.loss_and_grads(model, batch, gpt.mean)
    megatron_patch.apply(keep=keep)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        _, grads = gpt.loss_and_grads(model, batch, gpt.mean)
    assert (16, gpt.VOCAB) in saved
    check_grads(grads, expected)
    assert heads() == {"fused": 1}


OPTIONS = {
    "softcap": LossOptions(softcap=3.0),
    "scale": LossOptions(scale=0.5, softcap=2.0),
    "z-loss": LossOptions(z_loss_weight=0.1),
    "padding": LossOptions(vocab_size=80),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("factor", [None, 0.25, -2.0])
def test_scaled_logits(monkeypatch, options, factor):
    """With every option: as the loss on logits, also where the model scales them before."""
    batch = gpt.make_batch(2, 8, (-100,))
    batch.labels.clamp_(max=79)
    results = []
    for implementation in ("te_ce", "te_ce_linear"):
        model = ask(gpt.make_model())
        model.config.cross_entropy_fusion_impl = implementation
        if factor is not None:
            scale_logits(model, factor, monkeypatch)
        with megatron_patch.patched(options=options):
            results.append(gpt.loss_and_grads(model, batch, gpt.masked_sum))
            assert heads() == ({"fused": 1} if implementation == "te_ce_linear" else {})
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=1e-5)
    # The factor is applied to hidden x weight, or to the gradient of it, at another place: rounded otherwise.
    for name, grad in results[1][1].items():
        torch.testing.assert_close(grad, results[0][1][name], rtol=0, atol=4e-6 * float(grad.abs().max()))


def scale_logits(model, factor, monkeypatch):
    """Megatron's own way from 0.17 on (MuP), its place taken before the loss in earlier releases."""
    if hasattr(model, "_scale_logits"):
        monkeypatch.setattr(model.config, "use_mup", True)
        monkeypatch.setattr(model.config, "mup_output_mult", factor)
        return
    method = lambda labels, logits: type(model).compute_language_model_loss(model, labels, logits * factor)  # noqa: E731
    model.compute_language_model_loss = method


@gpt.needs_mtp
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_multi_token_prediction(tied, monkeypatch):
    megatron_patch.apply(strict=True)
    with gpt.without_cuda():
        model, batch = gpt.make_model(tied=tied, mtp_num_layers=2), gpt.make_batch(2, 8)
        expected = gpt.loss_and_grads(model, batch, gpt.mean, loss_mask=batch.mask)
        loss, grads = gpt.loss_and_grads(ask(model), batch, gpt.mean, loss_mask=batch.mask)
    assert heads() == {"fused": 3}
    torch.testing.assert_close(loss, expected[0], rtol=0, atol=1e-5)
    check_grads(grads, expected[1])
    with gpt.without_cuda():  # nor do its metrics make the logits
        monkeypatch.setattr("megatron_patch.deferred.Origin.logits", None)
        gpt.forward(model, batch, batch.labels, loss_mask=batch.mask)


@pytest.mark.skipif(not HAS_MUP, reason="this release has no MuP")
def test_mup():
    megatron_patch.apply(strict=True)
    model = gpt.make_model(use_mup=True, mup_output_mult=0.125)
    check_against_megatron(model, gpt.make_batch(2, 8), gpt.masked_sum)
