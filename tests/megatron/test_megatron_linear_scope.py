"""`te_ce_linear` on a real GPTModel: when logits are deferred and for how long, who may ask for them, what is said."""

from __future__ import annotations

import functools
import inspect
import weakref

import megatron_gpt as gpt
import pytest
import torch
from fused_head import ask, check_grads, heads
from torch import Tensor

import megatron_patch
from megatron_patch import linear
from megatron_patch.deferred import DeferredLogits, untouched

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]

HAS_PROCESSOR = "output_processor" in inspect.signature(gpt.GPTModel.forward).parameters


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


def test_without_labels_logits_are_ordinary(monkeypatch):
    model, batch = gpt.make_model(), gpt.make_batch(2, 8)
    expected = gpt.forward(model, batch, None)
    megatron_patch.apply(strict=True)
    with monkeypatch.context() as patch:
        patch.setattr("megatron_patch.output_layer.Origin", None)  # nothing is deferred
        logits = gpt.forward(ask(model), batch, None)
    assert type(logits) is Tensor
    assert torch.equal(logits, expected)
    assert heads() == {}
    hidden = torch.randn(3, 2, gpt.HIDDEN)
    assert type(model.output_layer(hidden)[0]) is Tensor  # nor where a user calls the layer
    gpt.forward(model, batch, batch.labels)
    assert type(model.output_layer(hidden)[0]) is Tensor


def test_weight_that_is_passed_in():
    """It comes before the layer's own, as with an embedding that is tied to a layer which has one."""
    megatron_patch.apply(strict=True)
    model, batch = gpt.make_model(), gpt.make_batch(2, 8)
    other = torch.nn.Parameter(torch.randn(gpt.VOCAB, gpt.HIDDEN))
    model.output_layer.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"weight": other}), with_kwargs=True
    )
    loss = gpt.forward(ask(model), batch, batch.labels)
    loss.mean().backward()
    assert heads() == {"fused": 1}
    torch.testing.assert_close(loss.double(), gpt.dense_loss(model, batch), rtol=0, atol=2e-5)
    assert other.grad.any()
    assert model.output_layer.weight.grad is None


@pytest.mark.parametrize("what", ["input", "weight"])
def test_a_layer_whose_input_changes_before_the_loss_is_an_error(what):
    """The fused loss would be that of other logits."""
    megatron_patch.apply()
    model, batch, changed = ask(gpt.make_model()), gpt.make_batch(2, 8), []
    model.output_layer.register_forward_pre_hook(lambda _, args: changed.append(args[0]))
    changed += [model.output_layer.weight] if what == "weight" else []

    def loss_method(labels, logits):
        with torch.no_grad():
            changed[0].mul_(2.0)
        return type(model).compute_language_model_loss(model, labels, logits)

    model.compute_language_model_loss = loss_method
    with pytest.raises(RuntimeError, match="changed in place after the layer was called"):
        gpt.forward(model, batch, batch.labels)


def test_labels_by_position():
    megatron_patch.apply(strict=True)
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    positions = torch.arange(8).expand(2, 8)
    loss = model(batch.tokens, positions, None, None, batch.labels)
    assert heads() == {"fused": 1}
    torch.testing.assert_close(loss.double(), gpt.dense_loss(model, batch), rtol=0, atol=1e-5)


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
    assert "te_ce_linear so far" not in str(megatron_patch.status())


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
    assert "te_ce_linear so far: fused 3" in str(megatron_patch.status())
    assert megatron_patch.status().reasons == ()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoint_around_the_head(use_reentrant):
    """Backward runs the layer again, outside the model's forward; both times it must do the same."""
    model, batch = gpt.make_model(), gpt.make_batch(2, 8)
    _, expected = gpt.loss_and_grads(model, batch, gpt.mean)
    layer = model.output_layer
    ask(model)
    megatron_patch.apply()
    # The model's own layer, called from inside a checkpoint by the user's loss.
    real = type(model).compute_language_model_loss
    hidden = []
    layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0]) if not hidden else None)

    def loss(labels, logits):
        head = lambda x: layer(x)[0]  # noqa: E731
        return real(model, labels, torch.utils.checkpoint.checkpoint(head, hidden[0], use_reentrant=use_reentrant))

    model.compute_language_model_loss = loss
    _, grads = gpt.loss_and_grads(model, batch, gpt.mean)
    check_grads(grads, expected)
    assert megatron_patch.status().reasons == (
        "the output layer runs inside an activation checkpoint, or without gradients, unlike the model",
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_the_model(use_reentrant):
    model, batch = gpt.make_model(), gpt.make_batch(2, 8)
    _, expected = gpt.loss_and_grads(model, batch, gpt.mean)
    ask(model).zero_grad()
    megatron_patch.apply(strict=True)
    start = torch.zeros((), requires_grad=True)  # the reentrant kind wants an input that has a gradient

    def run(_):
        return gpt.forward(model, batch, batch.labels)

    torch.utils.checkpoint.checkpoint(run, start, use_reentrant=use_reentrant).mean().backward()
    check_grads({name: parameter.grad for name, parameter in model.named_parameters()}, expected)
    assert set(megatron_patch.status().heads) == {"fused"}
