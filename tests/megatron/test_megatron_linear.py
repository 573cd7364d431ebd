"""`te_ce_linear` on a real GPTModel, one rank: right numbers, the right parameter's gradient, and no logits."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref

import megatron_gpt as gpt
import pytest
import torch
from fused_head import ask, broken_linear_losses, check_grads, heads
from torch import Tensor

import megatron_patch
from megatron_patch import linear
from megatron_patch.deferred import DeferredLogits, untouched
from te_ce import LossOptions

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]

FIELDS = {field.name for field in dataclasses.fields(gpt.TransformerConfig)}
HAS_MTP = "mtp_num_layers" in FIELDS
HAS_MUP = "use_mup" in FIELDS
HAS_PROCESSOR = "output_processor" in inspect.signature(gpt.GPTModel.forward).parameters


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


def test_logits_are_not_made(monkeypatch):
    """Nobody calls the layer's own forward, and nobody holds the deferred object after the model's forward."""
    megatron_patch.apply()
    model, batch, seen = ask(gpt.make_model()), gpt.make_batch(2, 8), []
    real = linear.linear_loss

    def watch(labels, logits, application):
        seen.append(weakref.ref(logits.origin))
        loss = real(labels, logits, application)
        assert untouched(logits)
        return loss

    monkeypatch.setattr("megatron_patch.wiring.linear_loss", watch)
    loss = gpt.forward(model, batch, batch.labels)
    assert [ref() for ref in seen] == [None]
    loss.sum().backward()


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


def test_without_labels_logits_are_ordinary():
    model, batch = gpt.make_model(), gpt.make_batch(2, 8)
    expected = gpt.forward(model, batch, None)
    megatron_patch.apply(strict=True)
    logits = gpt.forward(ask(model), batch, None)
    assert type(logits) is Tensor
    assert torch.equal(logits, expected)
    assert heads() == {}
    hidden = torch.randn(3, 2, gpt.HIDDEN)
    assert type(model.output_layer(hidden)[0]) is Tensor  # nor where a user calls the layer


def test_labels_by_position():
    megatron_patch.apply(strict=True)
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    positions = torch.arange(8).expand(2, 8)
    loss = model(batch.tokens, positions, None, None, batch.labels)
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


def test_instance_override_calls_the_class():
    """Distillation sets the method on the instance and calls `type(self).compute_language_model_loss`."""
    megatron_patch.apply(strict=True)
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    seen = []

    def override(self, labels, logits):
        seen.append(logits.shape)
        return type(self).compute_language_model_loss(self, labels, logits) * 2

    model.compute_language_model_loss = functools.partial(override, model)
    loss, _ = gpt.loss_and_grads(model, batch, gpt.mean)
    assert seen == [(8, 2, gpt.VOCAB)]
    torch.testing.assert_close(loss.double(), 2 * gpt.dense_loss(model, batch), rtol=0, atol=2e-5)


def test_instance_override_with_a_loss_of_its_own():
    """Anything else gets ordinary logits, and their gradient; with what a saver of logits returns, too."""
    megatron_patch.apply()
    model, batch = gpt.make_model(), gpt.make_batch(2, 8)
    model.compute_language_model_loss = lambda labels, logits: (logits.softmax(-1) ** 2).sum(-1).transpose(0, 1)
    expected = gpt.loss_and_grads(model, batch, gpt.mean)
    loss, grads = gpt.loss_and_grads(ask(model), batch, gpt.mean)
    assert torch.equal(loss, expected[0])
    check_grads(grads, expected[1])
    assert heads() == {}
    model.compute_language_model_loss = lambda labels, logits: (logits * 0).sum(-1).transpose(0, 1)
    loss, grads = gpt.loss_and_grads(model, batch, gpt.mean)
    assert (loss == 0).all()
    assert all((grad == 0).all() for grad in grads.values())


def test_logits_that_outlive_the_forward():
    """They are those of the weight of the forward, whatever an optimizer does to it since, storage or not."""
    megatron_patch.apply()
    model, batch, kept = ask(gpt.make_model()), gpt.make_batch(2, 8), []
    expected = gpt.forward(model, batch, None).transpose(0, 1)
    real = type(model).compute_language_model_loss
    model.compute_language_model_loss = lambda y, x: kept.append(x) or real(model, y, x)
    gpt.forward(model, batch, batch.labels)
    model.output_layer.weight.data.zero_()
    assert isinstance(kept[0], DeferredLogits)
    assert torch.equal(kept[0], expected)
    model.compute_language_model_loss = lambda y, x: x
    assert type(gpt.forward(model, batch, batch.labels)) is Tensor


@pytest.mark.skipif(not HAS_PROCESSOR, reason="this release has no output_processor")
def test_output_processor():
    """It calls the layer itself, and gets logits that do what logits do."""
    megatron_patch.apply()
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)

    def processor(hidden_states, output_layer, output_weight, labels, compute_language_model_loss, **_):
        logits, _ = output_layer(hidden_states, weight=output_weight)
        return compute_language_model_loss(labels, logits), logits.argmax(-1)

    positions = torch.arange(8).expand(2, 8)
    loss, best = model(batch.tokens, positions, None, labels=batch.labels, output_processor=processor)
    assert heads() == {"fused": 1}
    torch.testing.assert_close(loss.double(), gpt.dense_loss(model, batch), rtol=0, atol=1e-5)
    assert torch.equal(best, gpt.forward(model, batch, None).argmax(-1).t())


@pytest.mark.skipif(not HAS_MTP, reason="this release has no multi-token prediction")
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


def test_config_in_the_constructor_and_a_model_built_before_the_patch():
    batch = gpt.make_batch(2, 8)
    built_before = ask(gpt.make_model())
    megatron_patch.apply(strict=True)
    fields = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te_ce_linear"}
    losses = [gpt.loss_and_grads(model, batch, gpt.mean)[0] for model in (built_before, gpt.make_model(**fields))]
    assert torch.equal(*losses)
    assert heads() == {"fused": 2}


@pytest.mark.parametrize("implementation", ["te_ce", None])
def test_inert_without_the_value(asking, implementation):
    megatron_patch.apply()
    model, batch = gpt.make_model(), gpt.make_batch(2, 8)
    if implementation:
        asking(model)
    seen = []
    model.output_layer.register_forward_hook(lambda layer, _, output: seen.append(type(output[0])))
    gpt.loss_and_grads(model, batch, gpt.mean)
    assert seen == [Tensor]
    assert heads() == {}
    assert "te_ce_linear" not in str(megatron_patch.status())


def test_revert_restores_by_identity():
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    forward, call, names = ColumnParallelLinear.__dict__["forward"], LanguageModule.__call__, set(vars(LanguageModule))
    with megatron_patch.patched():
        assert ColumnParallelLinear.__dict__["forward"] is not forward
        assert LanguageModule.__call__ is not call
    assert ColumnParallelLinear.__dict__["forward"] is forward
    assert LanguageModule.__call__ is call
    assert set(vars(LanguageModule)) == names


def test_log_and_status_say_it_once(caplog):
    megatron_patch.apply()
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    caplog.clear()
    for _ in range(3):
        gpt.loss_and_grads(model, batch, gpt.mean)
    (record,) = [record for record in caplog.records if record.name == "megatron_patch"]
    assert "te_ce_linear: the loss is fused with the output layer" in record.getMessage()
    assert "te_ce_linear: fused 3" in str(megatron_patch.status())
    assert megatron_patch.status().reasons == ()
