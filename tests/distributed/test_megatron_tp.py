"""The plugin on a real GPTModel and on Megatron's own functions, tensor-parallel, every rank checking for itself.

torchrun --nproc-per-node 2 -m pytest tests/distributed
"""

from __future__ import annotations

import inspect
import os

import megatron_gpt as gpt
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions import fused_cross_entropy
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel import cross_entropy, vocab_parallel_cross_entropy

import megatron_patch
from megatron_patch import native, wiring
from te_ce import LossOptions
from te_ce.counters import served

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
STALE = {"unfused": vocab_parallel_cross_entropy, "fused": fused_vocab_parallel_cross_entropy}  # in no module's names
FUSED_TAKES_GROUP = "tp_group" in inspect.signature(fused_vocab_parallel_cross_entropy).parameters


# With 4 ranks also two disjoint groups of 2, which hold different data.
@pytest.fixture(scope="module", params=sorted({2, WORLD}) if WORLD == 4 else [WORLD])
def group(request, tp_group):
    with gpt.model_parallel(request.param), torch.compiler.set_stance("force_eager"):
        yield parallel_state.get_tensor_model_parallel_group()


def batch_for(group, b=2, s=8, negative=()):
    """The same on all ranks of a group, another one in every group."""
    return gpt.make_batch(b, s, negative, seed=dist.get_global_rank(group, 0))


def ask(model, implementation="te_ce"):
    model.config.cross_entropy_loss_fusion = True
    model.config.cross_entropy_fusion_impl = implementation
    return model


def count():
    return sum(served().values())


def check_loss(loss, dense, group):
    """The dense float64 loss to 1e-5, float32, the same bits on every rank."""
    everybody = gpt.gather(loss.unsqueeze(0), group, dim=0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)
    assert all(torch.equal(other, loss) for other in everybody)


def check_grads(grads, expected):
    """Equal to float32 rounding: 2e-6 of the largest entry of each parameter's gradient."""
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=2e-6 * float(expected[name].abs().max()))


def check_model(model, batch, reduce, group, implementation="te_ce", **arguments):
    """With the flag: the dense loss, and the parameter gradients of Megatron's unfused loss."""
    _, expected = gpt.loss_and_grads(model, batch, reduce)
    dense = gpt.dense_loss(model, batch, group)
    before = count()
    loss, grads = gpt.loss_and_grads(ask(model, implementation), batch, reduce, **arguments)
    assert count() == before + 1
    check_loss(loss, dense, group)
    check_grads(grads, expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("b", "s", "negative"),
    [(2, 8, ()), (1, 8, ()), (2, 1, ()), (2, 8, (-100, -1, -7))],
    ids=["plain", "one sequence", "one token", "ignored"],
)
@pytest.mark.parametrize("reduce", [gpt.masked_sum, gpt.mean])
def test_flag(group, tied, b, s, negative, reduce):
    if negative and reduce is gpt.mean:
        reduce = lambda loss, mask: (loss * mask).mean()  # noqa: E731 - Megatron's own has no ignored rows without a mask
    megatron_patch.apply()
    check_model(gpt.make_model(group.size(), tied=tied), batch_for(group, b, s, negative), reduce, group)


def test_replace_te(group):
    megatron_patch.apply(replace_te=True)
    model, batch = gpt.make_model(group.size()), batch_for(group, negative=(-100, -1))
    check_model(model, batch, gpt.masked_sum, group, "te")


@pytest.mark.parametrize("fault", gpt.broken_losses(None))
def test_the_checks_reject_wrong_losses(group, monkeypatch, fault):
    real = wiring.vocab_parallel_cross_entropy
    monkeypatch.setattr(wiring, "vocab_parallel_cross_entropy", gpt.broken_losses(real)[fault])
    megatron_patch.apply()
    with pytest.raises(AssertionError, match="not close"):
        check_model(gpt.make_model(group.size()), batch_for(group), gpt.masked_sum, group)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "native fused"])
def test_inert_without_the_flag(group, fused):
    holders = (cross_entropy, fused_cross_entropy, language_module, ModelParallelConfig)
    held = [dict(vars(holder)) for holder in holders]
    batch = batch_for(group, 2, 8, (-100,))
    model = gpt.make_model(group.size(), cross_entropy_loss_fusion=fused)
    expected, expected_grads = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    before = count()
    megatron_patch.apply()
    loss, grads = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    assert torch.equal(loss, expected)
    assert count() == before
    assert all(torch.equal(grads[name], expected_grads[name]) for name in expected_grads)
    for holder, names in zip(holders[:3], held, strict=False):
        assert all(vars(holder)[name] is value for name, value in names.items() if not name.startswith("__"))
    megatron_patch.revert()
    for holder, names in zip(holders, held, strict=True):
        assert all(vars(holder)[name] is value for name, value in names.items() if name != "__dict__")


# Megatron's gather calls it.
@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor. is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["parallel_output", "runtime_gather_output"])
@pytest.mark.parametrize("by", ["flag", "replace_native", "replace_te"])
def test_gathered_logits(group, how, by, monkeypatch):
    """Every rank has all columns: the plain loss, not one that is log(TP) too high."""
    if gpt.device().type == "cpu":  # Megatron's gather allocates on "the current CUDA device"
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    megatron_patch.apply(replace_native=by == "replace_native", replace_te=by == "replace_te")
    sharded, batch = gpt.make_model(group.size()), batch_for(group)
    dense = gpt.dense_loss(sharded, batch, group)
    _, expected = gpt.loss_and_grads(ask(sharded), batch, gpt.masked_sum)
    model, arguments = gpt.make_model(group.size(), parallel_output=how != "parallel_output"), {}
    if how in inspect.signature(model.forward).parameters:
        arguments[how] = True
    else:  # the setting of the layer, which old releases have nothing else for
        model.output_layer.gather_output = True
    before = count()
    if by != "replace_native":
        ask(model, "te" if by == "replace_te" else "te_ce")
    loss, grads = gpt.loss_and_grads(model, batch, gpt.masked_sum, **arguments)
    assert count() == before + 1
    check_loss(loss, dense, group)
    check_grads(grads, expected)


def test_options_reach_every_rank(group):
    model, batch = ask(gpt.make_model(group.size())), batch_for(group)
    megatron_patch.apply(options=LossOptions(label_smoothing=0.2, smoothing="others"))
    loss, _ = gpt.loss_and_grads(model, batch, gpt.mean)
    logits = gpt.gather(gpt.forward(model, batch, None).detach(), group, dim=-1)
    check_loss(loss, gpt.dense_cross_entropy(logits, batch.labels, 0.2), group)


def test_label_past_the_vocabulary_with_check(group):
    megatron_patch.apply(options=LossOptions(check_targets=True))
    model, batch = ask(gpt.make_model(group.size())), batch_for(group, 2, 8, (-100, -3))
    gpt.forward(model, batch, batch.labels)
    batch.labels[1, 3] = gpt.VOCAB
    with pytest.raises(IndexError, match=str(gpt.VOCAB)):
        gpt.forward(model, batch, batch.labels)


def test_only_rank_0_logs(group, caplog):
    megatron_patch.apply()
    assert bool([r for r in caplog.records if r.name == "megatron_patch"]) == (dist.get_rank() == 0)


# Megatron's own functions, replaced.


def inputs(group):
    """This rank's shard of logits [s, b, V / TP], all of them, and the targets [s, b]."""
    generator = torch.Generator().manual_seed(dist.get_global_rank(group, 0))
    logits = (torch.randn(5, 2, gpt.VOCAB, generator=generator) * 3).to(gpt.device())
    target = torch.randint(0, gpt.VOCAB, (5, 2), generator=generator).to(gpt.device())
    return logits.chunk(group.size(), dim=-1)[group.rank()].contiguous(), logits, target


def run(call, logits, target, *args, **kwargs):
    """Loss, and gradient for upstream gradients that all differ and arrive transposed."""
    x = logits.clone().requires_grad_()
    loss = call(x * 1, target, *args, **kwargs)
    upstream = torch.arange(1.0, loss.numel() + 1, device=loss.device).view(loss.shape[1], loss.shape[0])
    (loss.transpose(0, 1).contiguous() * upstream).sum().backward()
    return loss.detach(), x.grad


def check_function(result, group, alpha=0.0):
    _, logits, target = inputs(group)
    loss, grad = run(gpt.dense_cross_entropy, logits.double(), target, alpha)
    check_loss(result[0], loss, group)
    torch.testing.assert_close(result[1].double(), grad.chunk(group.size(), dim=-1)[group.rank()], rtol=0, atol=1e-5)


def test_native_functions(group):
    shard, _, target = inputs(group)
    megatron_patch.apply(replace_native=True)
    arguments = (group,) if FUSED_TAKES_GROUP else ()
    before = count()
    check_function(run(STALE["unfused"], shard, target), group)
    check_function(run(cross_entropy.vocab_parallel_cross_entropy, shard, target), group)
    check_function(run(STALE["fused"], shard, target, *arguments), group)
    check_function(run(language_module.fused_vocab_parallel_cross_entropy, shard, target, *arguments), group)
    assert count() == before + 4


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_label_smoothing_is_over_the_whole_vocabulary(group, alpha):
    shard, _, target = inputs(group)
    if group.size() > 1:  # Megatron's own smooths over the shard: the check must tell the difference
        with pytest.raises(AssertionError):
            check_function(run(STALE["unfused"], shard, target, alpha), group, alpha)
    megatron_patch.apply(replace_native=True)
    before = count()
    check_function(run(STALE["unfused"], shard, target, alpha), group, alpha)
    check_function(run(STALE["unfused"], shard, target, label_smoothing=alpha), group, alpha)
    assert count() == before + 2


@pytest.mark.parametrize("fault", gpt.broken_losses(None))
def test_the_function_checks_reject_wrong_losses(group, monkeypatch, fault):
    real = native.vocab_parallel_cross_entropy
    monkeypatch.setattr(native, "vocab_parallel_cross_entropy", gpt.broken_losses(real)[fault])
    megatron_patch.apply(replace_native=True)
    shard, _, target = inputs(group)
    with pytest.raises(AssertionError, match="not close"):
        check_function(run(STALE["unfused"], shard, target), group)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "native fused"])
def test_model_without_the_flag_but_native_replaced(group, fused):
    megatron_patch.apply(replace_native=True)
    model, batch = gpt.make_model(group.size(), cross_entropy_loss_fusion=fused), batch_for(group, 2, 8, (-100,))
    before = count()
    loss, _ = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    assert count() == before + 1
    check_loss(loss, gpt.dense_loss(model, batch, group), group)
