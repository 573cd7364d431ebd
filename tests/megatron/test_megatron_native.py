"""replace_native: Megatron's own functions served by te_ce through every alias, and put back."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import megatron_gpt as gpt
import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_cross_entropy
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy as fused_alias
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as unfused_alias

import megatron_patch
from megatron_patch import native
from te_ce import LossOptions
from te_ce.counters import served

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]

# Not a module attribute: nothing that searches sys.modules can find this one.
STALE = {"unfused": unfused_alias, "fused": fused_alias}
FUSED_TAKES_GROUP = "tp_group" in inspect.signature(fused_alias).parameters
UNFUSED_TAKES_GROUP = "tp_group" in inspect.signature(unfused_alias).parameters


def unfused_callers():
    return {
        "stale": STALE["unfused"],
        "this module": globals()["unfused_alias"],
        "package": tensor_parallel.vocab_parallel_cross_entropy,
        "defining module": cross_entropy.vocab_parallel_cross_entropy,
        "class": cross_entropy._VocabParallelCrossEntropy.apply,
    }


def fused_callers():
    group = (parallel_state.get_tensor_model_parallel_group(),) if FUSED_TAKES_GROUP else ()
    callers = {
        "stale": STALE["fused"],
        "this module": globals()["fused_alias"],
        "language module": language_module.fused_vocab_parallel_cross_entropy,
        "defining module": fused_cross_entropy.fused_vocab_parallel_cross_entropy,
        "class": fused_cross_entropy._VocabParallelCrossEntropy.apply,
    }
    return {name: lambda x, y, call=call: call(x, y, *group) for name, call in callers.items()}


def inputs(dtype=torch.float32):
    torch.manual_seed(3)
    logits = (torch.randn(5, 2, gpt.VOCAB) * 3).to(dtype)
    return logits, torch.randint(0, gpt.VOCAB, (5, 2))


def run(call, logits, target, *args, **kwargs):
    """Loss and gradient for upstream gradients that all differ, with the strides of Megatron's [b, s] transpose."""
    x = logits.clone().requires_grad_()
    loss = call(x * 1, target, *args, **kwargs)
    weights = torch.arange(1.0, loss.numel() + 1).view(loss.shape[1], loss.shape[0])
    (loss.transpose(0, 1).contiguous() * weights).sum().backward()
    return loss.detach(), x.grad


def dense(logits, target, alpha=0.0):
    x = logits.double().requires_grad_()
    loss = gpt.dense_cross_entropy(x, target, alpha)
    weights = torch.arange(1.0, loss.numel() + 1).view(loss.shape[1], loss.shape[0])
    (loss.t() * weights).sum().backward()
    return loss.detach(), x.grad


def check(result, expected):
    loss, grad = result
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), expected[1], rtol=0, atol=1e-5)  # upstream gradients of 1 to 10


def count():
    return sum(served().values())


@pytest.mark.parametrize("replace_native", [True, False])
def test_every_alias(replace_native):
    logits, target = inputs()
    expected = dense(logits, target)
    megatron_patch.apply(replace_native=replace_native)
    for call in unfused_callers().values():
        before = count()
        check(run(call, logits, target), expected)
        assert count() - before == replace_native
    for call in fused_callers().values():
        before = count()
        loss, _ = run(call, logits, target)  # Megatron's fused gradient is bfloat16
        torch.testing.assert_close(loss.double(), expected[0], rtol=1e-6, atol=1e-6)
        assert count() - before == replace_native


def test_fused_gradient():
    logits, target = inputs()
    megatron_patch.apply(replace_native=True)
    for call in fused_callers().values():
        check(run(call, logits, target), dense(logits, target))


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_label_smoothing_positional_and_keyword(alpha):
    logits, target = inputs()
    megatrons_own = run(STALE["unfused"], logits, target, alpha)
    expected = dense(logits, target, alpha)
    check(megatrons_own, expected)  # with one rank the shard's width is the vocabulary's
    megatron_patch.apply(replace_native=True)
    before = count()
    for call in (STALE["unfused"], tensor_parallel.vocab_parallel_cross_entropy):
        check(run(call, logits, target, alpha), expected)
        check(run(call, logits, target, label_smoothing=alpha), expected)
        by_name = lambda x, y, call=call: call(vocab_parallel_logits=x, target=y, label_smoothing=alpha)  # noqa: E731
        check(run(by_name, logits, target), expected)
    assert count() == before + 6


def test_smoothing_argument_overrides_the_options():
    logits, target = inputs()
    megatron_patch.apply(replace_native=True, options=LossOptions(label_smoothing=0.3))
    check(run(unfused_alias, logits, target, 0.1), dense(logits, target, 0.1))
    uniform = 0.3 * (gpt.VOCAB - 1) / gpt.VOCAB
    check(run(unfused_alias, logits, target), dense(logits, target, uniform))


def test_negative_labels_are_ignored():
    logits, target = inputs()
    target = target.clone()
    target[0, 0], target[3, 1] = -100, -1
    kept = target.clone()
    megatron_patch.apply(replace_native=True)
    for call in (*unfused_callers().values(), *fused_callers().values()):
        loss, grad = run(call, logits, target)
        check((loss, grad), dense(logits, target))
        assert loss[0, 0] == 0
        assert (grad[3, 1] == 0).all()
    assert torch.equal(target, kept)


def test_target_of_any_strides():
    """Megatron's own refuses this one."""
    logits, target = inputs()
    megatron_patch.apply(replace_native=True)
    check(run(STALE["unfused"], logits, target.t().contiguous().t()), dense(logits, target))


def test_float32_logits_are_not_overwritten():
    logits, target = inputs()
    before = logits.clone()
    megatron_patch.apply(replace_native=True)
    STALE["unfused"](logits, target)
    assert torch.equal(logits, before)


def test_signatures_are_megatrons():
    before = inspect.signature(unfused_alias), inspect.signature(fused_alias)
    megatron_patch.apply(replace_native=True)
    now = tensor_parallel.vocab_parallel_cross_entropy, language_module.fused_vocab_parallel_cross_entropy
    assert now[0] is not STALE["unfused"]
    assert now[1] is not STALE["fused"]
    assert tuple(map(inspect.signature, now)) == before


@pytest.mark.parametrize("fused", [False, True])
def test_model_without_the_flag(fused):
    model, batch = gpt.make_model(cross_entropy_loss_fusion=fused), gpt.make_batch(2, 8, (-100,))
    megatron_patch.apply(replace_native=True)
    before = count()
    loss, _ = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    assert count() == before + 1
    torch.testing.assert_close(loss.double(), gpt.dense_loss(model, batch), rtol=0, atol=1e-5)


def test_originals_work_while_replaced():
    """The kept references, called directly: Megatron's numbers, by Megatron's code."""
    logits, target = inputs()
    original = cross_entropy._VocabParallelCrossEntropy
    expected = run(original.apply, logits, target, 0.0)
    megatron_patch.apply(replace_native=True)
    before = count()
    result = run(original.apply, logits, target, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert count() == before


def test_revert_reaches_all_of_them(monkeypatch):
    classes = cross_entropy._VocabParallelCrossEntropy, fused_cross_entropy._VocabParallelCrossEntropy
    megatron_patch.apply(replace_native=True)
    names = {binding.module + "." + binding.attribute for binding in megatron_patch.status().bindings}
    assert f"{__name__}.unfused_alias" in names
    assert f"{__name__}.fused_alias" in names
    late = ModuleType("late_importer")
    late.f = tensor_parallel.vocab_parallel_cross_entropy
    monkeypatch.setitem(sys.modules, "late_importer", late)
    held = tensor_parallel.vocab_parallel_cross_entropy
    held_class = cross_entropy._VocabParallelCrossEntropy
    megatron_patch.revert()
    for f in (unfused_alias, tensor_parallel.vocab_parallel_cross_entropy, late.f):
        assert f is STALE["unfused"]
    for f in (fused_alias, language_module.fused_vocab_parallel_cross_entropy):
        assert f is STALE["fused"]
    assert (cross_entropy._VocabParallelCrossEntropy, fused_cross_entropy._VocabParallelCrossEntropy) == classes
    before = count()
    check(run(held, *inputs()), dense(*inputs()))
    check(run(held_class.apply, *inputs(), 0.0), dense(*inputs()))
    assert count() == before  # what somebody still holds of ours is Megatron's again


@pytest.mark.parametrize("fault", gpt.broken_losses(None))
def test_the_checks_reject_wrong_losses(monkeypatch, fault):
    monkeypatch.setattr(
        native, "vocab_parallel_cross_entropy", gpt.broken_losses(native.vocab_parallel_cross_entropy)[fault]
    )
    megatron_patch.apply(replace_native=True)
    logits, target = inputs()
    with pytest.raises(AssertionError, match="not close"):
        check(run(STALE["unfused"], logits, target), dense(logits, target))
