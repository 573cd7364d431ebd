"""The flag on a real GPTModel, one rank: right numbers with it, Megatron untouched without it."""

from __future__ import annotations

import functools

import megatron_gpt as gpt
import pytest
import torch

import megatron_patch
from megatron_patch import patch, wiring
from te_ce import LossOptions
from te_ce.counters import served

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]


def loss_count():
    return sum(served().values())


def check_against_megatron(model, batch, reduce, ask):
    """Flag on: the dense float64 loss to 1e-5, and the parameter gradients of Megatron's unfused loss."""
    _, expected = gpt.loss_and_grads(model, batch, reduce)
    dense = gpt.dense_loss(model, batch)
    before = loss_count()
    loss, grads = gpt.loss_and_grads(ask(model), batch, reduce)
    assert loss_count() == before + 1
    assert loss.dtype == torch.float32
    assert loss.is_contiguous()
    assert loss.shape == batch.labels.shape
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)
    assert (loss[batch.labels < 0] == 0).all()
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        # 2e-6 of the largest entry: float32 rounding through one layer and the head, over 16 rows.
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=2e-6 * float(expected[name].abs().max()))


BATCHES = {
    "plain": (2, 8, ()),
    "one sequence": (1, 8, ()),  # labels [s, 1] come with the row stride of the caller's tensor
    "one token": (2, 1, ()),
    "ignored": (2, 8, (-100, -1, -7)),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("b", "s", "negative"), BATCHES.values(), ids=BATCHES)
def test_flag(asking, b, s, negative, tied):
    megatron_patch.apply()
    model, batch = gpt.make_model(tied=tied), gpt.make_batch(b, s, negative)
    labels = batch.labels.clone()
    check_against_megatron(model, batch, gpt.masked_sum, asking)
    assert torch.equal(batch.labels, labels)


def test_mean(asking):  # its gradient arrives at the loss expanded
    megatron_patch.apply()
    check_against_megatron(gpt.make_model(), gpt.make_batch(2, 8), gpt.mean, asking)


@pytest.mark.parametrize("fault", gpt.broken_losses(None))
def test_the_checks_reject_wrong_losses(asking, monkeypatch, fault):
    monkeypatch.setattr(
        wiring, "vocab_parallel_cross_entropy", gpt.broken_losses(wiring.vocab_parallel_cross_entropy)[fault]
    )
    megatron_patch.apply()
    with pytest.raises(AssertionError, match="not close"):
        check_against_megatron(gpt.make_model(), gpt.make_batch(2, 8), gpt.masked_sum, asking)


def test_flag_in_the_constructor_and_a_model_built_before_the_patch(asking):
    batch = gpt.make_batch(2, 8)
    built_before = asking(gpt.make_model())
    megatron_patch.apply()
    built_after = gpt.make_model(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te_ce")
    losses = [gpt.loss_and_grads(model, batch, gpt.mean)[0] for model in (built_before, built_after)]
    assert torch.equal(*losses)
    torch.testing.assert_close(losses[0].double(), gpt.dense_loss(built_before, batch), rtol=0, atol=1e-5)


def test_log_says_once_what_serves(asking, caplog):
    megatron_patch.apply()
    model, batch = asking(gpt.make_model()), gpt.make_batch(2, 8)
    caplog.clear()
    for _ in range(3):
        gpt.loss_and_grads(model, batch, gpt.mean)
    assert [record.getMessage() for record in caplog.records if record.name == "megatron_patch"] == [
        "megatron_patch: te_ce: the loss is computed on logits"
    ]
    caplog.clear()
    patch.sum_up()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "megatron_patch"]
    assert line == f"megatron_patch: losses served in this process: triton 0, torch {served()['torch']}"


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "native fused"])
def test_inert_without_the_flag(fused):
    from megatron.core.models.common.language_module import language_module
    from megatron.core.tensor_parallel import cross_entropy

    model, batch = gpt.make_model(cross_entropy_loss_fusion=fused), gpt.make_batch(2, 8, (-100,))
    expected, expected_grads = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    assert expected_grads
    held = {**vars(language_module), **vars(cross_entropy)}
    count = loss_count()
    megatron_patch.apply()
    loss, grads = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    assert torch.equal(loss, expected)
    assert all(torch.equal(grads[name], expected_grads[name]) for name in expected_grads)
    assert loss_count() == count
    now = {**vars(language_module), **vars(cross_entropy)}
    assert all(now[name] is held[name] for name in held)


def test_revert_restores_by_identity():
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.models.common.language_module.language_module import LanguageModule

    method = LanguageModule.__dict__["compute_language_model_loss"]
    post_init = ModelParallelConfig.__dict__["__post_init__"]
    with megatron_patch.patched():
        assert LanguageModule.__dict__["compute_language_model_loss"] is not method
        assert ModelParallelConfig.__dict__["__post_init__"] is not post_init
    assert LanguageModule.__dict__["compute_language_model_loss"] is method
    assert ModelParallelConfig.__dict__["__post_init__"] is post_init


def test_instance_override_calls_the_class(asking):
    """Distillation sets the method on the instance and calls `type(self).compute_language_model_loss`."""
    megatron_patch.apply()
    model, batch = asking(gpt.make_model()), gpt.make_batch(2, 8)
    seen = []

    def override(self, labels, logits):
        seen.append(logits.shape)
        return type(self).compute_language_model_loss(self, labels, logits) * 2

    model.compute_language_model_loss = functools.partial(override, model)
    loss, _ = gpt.loss_and_grads(model, batch, gpt.mean)
    assert len(seen) == 1
    torch.testing.assert_close(loss.double(), 2 * gpt.dense_loss(model, batch), rtol=0, atol=2e-5)


def test_per_token_loss_is_not_normalised(asking):
    """Two heads with different numbers of valid tokens, each averaged by its own count, as Megatron does."""
    megatron_patch.apply()
    model = asking(gpt.make_model())
    for negative in ((), (-100,), (-100,) * 7):
        batch = gpt.make_batch(1, 8, negative)
        loss, _ = gpt.loss_and_grads(model, batch, gpt.masked_sum)
        torch.testing.assert_close(loss.double(), gpt.dense_loss(model, batch), rtol=0, atol=1e-5)


def test_no_valid_token_at_all(asking):
    megatron_patch.apply()
    batch = gpt.make_batch(1, 8, (-100,) * 8)
    loss, grads = gpt.loss_and_grads(asking(gpt.make_model()), batch, lambda x, m: (x * m).sum() / m.sum().clamp(min=1))
    assert (loss == 0).all()
    assert all((grad == 0).all() for grad in grads.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_survive_the_loss(asking, dtype):
    """Metrics read the logits after the loss; and no copy of them is made for it."""
    megatron_patch.apply()
    model = asking(gpt.make_model())
    logits = torch.randn(8, 2, gpt.VOCAB).to(dtype).requires_grad_()
    before, version = logits.detach().clone(), logits._version
    loss = model.compute_language_model_loss(torch.randint(0, gpt.VOCAB, (2, 8)), logits)
    assert torch.equal(logits, before)
    assert logits._version == version
    loss.sum().backward()
    assert torch.equal(logits, before)
    assert logits.grad.dtype == dtype


def test_gradient_takes_over_logits_that_the_model_drops(asking):
    megatron_patch.apply()
    model, batch, pointers = asking(gpt.make_model()), gpt.make_batch(2, 8), {}

    def watch(layer, _, output):
        pointers["logits"] = output[0].data_ptr()
        # On the node: a hook on the tensor would keep the tensor.
        output[0].grad_fn.register_prehook(lambda grads: pointers.update(grad=grads[0].data_ptr()))

    handle = model.output_layer.register_forward_hook(watch)
    loss = gpt.forward(model, batch, batch.labels)
    handle.remove()
    loss.sum().backward()
    assert pointers["grad"] == pointers["logits"]


def test_label_past_the_vocabulary(asking):
    megatron_patch.apply()
    model, batch = asking(gpt.make_model()), gpt.make_batch(2, 8)
    batch.labels[1, 3] = gpt.VOCAB
    loss = gpt.forward(model, batch, batch.labels)
    assert loss[1, 3].isnan()
    assert loss.isnan().sum() == 1


def test_label_past_the_vocabulary_with_check(asking):
    megatron_patch.apply(options=LossOptions(check_targets=True))
    model, batch = asking(gpt.make_model()), gpt.make_batch(2, 8, (-100, -3))
    gpt.forward(model, batch, batch.labels)
    batch.labels[1, 3] = gpt.VOCAB
    with pytest.raises(IndexError, match=str(gpt.VOCAB)):
        gpt.forward(model, batch, batch.labels)


@pytest.mark.parametrize("smoothing", ["uniform", "others"])
def test_options_reach_the_loss(asking, smoothing):
    model, batch = asking(gpt.make_model()), gpt.make_batch(2, 8, (-100,))
    megatron_patch.apply(options=LossOptions(label_smoothing=0.2, smoothing=smoothing, ignore_index=-5))
    loss, _ = gpt.loss_and_grads(model, batch, gpt.mean)
    logits = gpt.forward(model, batch, None)
    alpha = 0.2 if smoothing == "others" else 0.2 * (gpt.VOCAB - 1) / gpt.VOCAB
    dense = gpt.dense_cross_entropy(logits, batch.labels, alpha)
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)
    assert (loss.double() - gpt.dense_cross_entropy(logits, batch.labels)).abs().max() > 0.01


def test_vocab_size_masks_padding(asking):
    model, batch = asking(gpt.make_model()), gpt.make_batch(2, 8)
    batch.labels.clamp_(max=79)
    megatron_patch.apply(options=LossOptions(vocab_size=80))
    loss, _ = gpt.loss_and_grads(model, batch, gpt.mean)
    dense = gpt.dense_cross_entropy(gpt.forward(model, batch, None)[..., :80], batch.labels)
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)


def test_other_users_of_softmax_keep_their_gradients():
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as kept

    def gradients():
        torch.manual_seed(0)
        result = []
        for use in (
            lambda x, w, y: (x.log_softmax(-1) * w).sum(),
            lambda x, w, y: torch.nn.functional.cross_entropy(x, y),
            lambda x, w, y: kept(x.clone(), y).sum(),
        ):
            x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
            use(x, torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 2, 4])).backward()
            result.append(x.grad)
        return result

    expected = gradients()
    with megatron_patch.patched():
        assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
    with megatron_patch.patched(replace_native=True):
        for a, b in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # Megatron's own computes in float32
