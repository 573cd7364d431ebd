"""`te_ce_linear` on a real GPTModel, tensor-parallel, with and without sequence parallelism, every rank for itself.

torchrun --nproc-per-node 2 -m pytest tests/distributed
"""

from __future__ import annotations

import os
import re
import types

import megatron_gpt as gpt
import pytest
import torch
import torch.distributed as dist
from fused_head import ask, broken_linear_losses, check_grads, fused_accumulation, heads, main_grads
from megatron.core import parallel_state

import megatron_patch
from megatron_patch import linear, output_layer
from megatron_patch.deferred import untouched
from te_ce import LossOptions

pytestmark = gpt.QUIET

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


# With 4 ranks also two disjoint groups of 2, which hold different data.
@pytest.fixture(scope="module", params=sorted({2, WORLD}) if WORLD == 4 else [WORLD])
def group(request, tp_group):
    with gpt.model_parallel(request.param), torch.compiler.set_stance("force_eager"), gpt.without_cuda():
        yield parallel_state.get_tensor_model_parallel_group()


@pytest.fixture(params=[False, True], ids=["replicated", "sequence-parallel"])
def sequence_parallel(request):
    if request.param and gpt.torch_norm is None:
        pytest.skip("this release's norm can't be replaced")
    return request.param


def batch_for(group, b=2, s=12, negative=()):
    """The same on all ranks of a group, another one in every group; 12 tokens: divided by 2, 3 and 4."""
    return gpt.make_batch(b, s, negative, seed=dist.get_global_rank(group, 0))


def check_model(model, batch, reduce, group):
    """Fused: the dense loss, the same bits on every rank, and the parameter gradients of Megatron's unfused loss."""
    _, expected = gpt.loss_and_grads(model, batch, reduce)
    dense = gpt.dense_loss(model, batch, group)
    loss, grads = gpt.loss_and_grads(ask(model), batch, reduce)
    assert heads() == {"fused": 1}
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)
    assert all(torch.equal(other, loss) for other in gpt.gather(loss.unsqueeze(0), group, dim=0))
    check_grads(grads, expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("b", "negative"), [(2, ()), (1, ()), (2, (-100, -1, -7))], ids=["", "b=1", "ignored"])
def test_fused(group, sequence_parallel, tied, b, negative):
    megatron_patch.apply(strict=True)
    model = gpt.make_model(group.size(), tied=tied, sequence_parallel=sequence_parallel)
    assert model.output_layer.sequence_parallel == sequence_parallel
    check_model(model, batch_for(group, b, negative=negative), gpt.masked_sum, group)


@pytest.mark.parametrize("fault", broken_linear_losses(None, ranks=WORLD))
def test_the_checks_reject_wrong_losses(group, monkeypatch, fault):
    broken = broken_linear_losses(linear.linear_cross_entropy_into, ranks=WORLD)[fault]
    monkeypatch.setattr(linear, "linear_cross_entropy_into", broken)
    megatron_patch.apply()
    model, batch = gpt.make_model(group.size()), batch_for(group)
    with pytest.raises(AssertionError):
        check_model(model, batch, gpt.masked_sum, group)


@pytest.mark.parametrize("frozen", ["weight", "all but weight"])
def test_frozen(group, sequence_parallel, frozen):
    megatron_patch.apply(strict=True)
    model = gpt.make_model(group.size(), sequence_parallel=sequence_parallel)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((name == "output_layer.weight") == (frozen != "weight"))
    check_model(model, batch_for(group), gpt.masked_sum, group)


@gpt.needs_mtp
def test_multi_token_prediction(group, sequence_parallel):
    megatron_patch.apply(strict=True)
    model = gpt.make_model(group.size(), tied=True, mtp_num_layers=1, sequence_parallel=sequence_parallel)
    batch = batch_for(group)
    expected = gpt.loss_and_grads(model, batch, gpt.mean, loss_mask=batch.mask)
    loss, grads = gpt.loss_and_grads(ask(model), batch, gpt.mean, loss_mask=batch.mask)
    assert heads() == {"fused": 2}
    torch.testing.assert_close(loss, expected[0], rtol=0, atol=1e-5)
    check_grads(grads, expected[1])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_main_grad(group, sequence_parallel, tied):
    megatron_patch.apply(strict=True)
    model = gpt.make_model(group.size(), tied=tied, sequence_parallel=sequence_parallel)
    batches = [batch_for(group), batch_for(group, negative=(-100,))]
    with fused_accumulation(model):
        expected = main_grads(model, batches, gpt.masked_sum)
        found = main_grads(ask(model), batches, gpt.masked_sum)
    assert heads() == {"fused": 2}
    check_grads(found, expected)


def test_options_reach_every_rank(group, sequence_parallel):
    model = ask(gpt.make_model(group.size(), sequence_parallel=sequence_parallel))
    batch = batch_for(group, negative=(-3,))
    megatron_patch.apply(strict=True, options=LossOptions(label_smoothing=0.2, smoothing="others"))
    loss, _ = gpt.loss_and_grads(model, batch, gpt.mean)
    logits = gpt.gather(gpt.forward(model, batch, None).detach(), group, dim=-1)
    torch.testing.assert_close(loss.double(), gpt.dense_cross_entropy(logits, batch.labels, 0.2), rtol=0, atol=1e-5)


def test_maxima(group, sequence_parallel, monkeypatch):
    """Part by part, every part gathered from all ranks."""
    monkeypatch.setattr("megatron_patch.maxima.ELEMENTS", 6 * gpt.VOCAB)
    megatron_patch.apply()
    model, batch = ask(gpt.make_model(group.size(), sequence_parallel=sequence_parallel)), batch_for(group)
    expected, found = gpt.forward(model, batch, None).max(dim=-1), []

    def loss_method(labels, logits):
        with torch.no_grad():
            found.extend(logits.max(dim=-1))
        return type(model).compute_language_model_loss(model, labels, logits)

    model.compute_language_model_loss = loss_method
    gpt.forward(model, batch, batch.labels)
    assert heads() == {"fused": 1}
    torch.testing.assert_close(found[0].t(), expected.values)
    assert torch.equal(found[1].t(), expected.indices)


@pytest.mark.parametrize("use", ["function", "autograd function", "before the loss", "scaled"])
def test_other_uses_of_the_logits(group, sequence_parallel, use):
    """They have all rows, and their gradient is summed over the ranks as the layer sums it."""
    model = gpt.make_model(group.size(), sequence_parallel=sequence_parallel)
    batch = batch_for(group)
    megatron_patch.apply()

    def loss_method(labels, logits):
        assert logits.shape == (12, 2, gpt.VOCAB // group.size())
        if use == "before the loss":
            logits.max()
        if use == "scaled":
            logits = logits * 0.5
        if use == "function":
            return logits.tanh().sum(-1).transpose(0, 1)
        if use == "autograd function":
            return linear_in_exp(logits).sum(-1).transpose(0, 1)
        return type(model).compute_language_model_loss(model, labels, logits)

    model.compute_language_model_loss = loss_method
    _, expected = gpt.loss_and_grads(model, batch, gpt.mean)
    _, grads = gpt.loss_and_grads(ask(model), batch, gpt.mean)
    check_grads(grads, expected)
    assert heads() == ({"fused": 1} if use in ("scaled", "before the loss") else {})


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = torch.exp(0.1 * x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return grad * 0.1 * result


linear_in_exp = _Exp.apply


def test_megatrons_own_loss_on_deferred_logits(group):
    """Its autograd function is handed the object itself."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    model, batch = gpt.make_model(group.size()), batch_for(group)
    _, expected = gpt.loss_and_grads(model, batch, gpt.mean)
    megatron_patch.apply()
    seen = []

    def loss_method(labels, logits):
        seen.append(untouched(logits))
        return vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()

    model.compute_language_model_loss = loss_method
    loss, grads = gpt.loss_and_grads(ask(model), batch, gpt.mean)
    assert seen == [True]
    torch.testing.assert_close(loss.double(), gpt.dense_loss(model, batch, group), rtol=0, atol=1e-5)
    check_grads(grads, expected)


def test_gathered_logits_are_not_deferred(group):
    megatron_patch.apply()
    model, batch = ask(gpt.make_model(group.size(), parallel_output=False)), batch_for(group)
    loss = gpt.forward(model, batch, batch.labels)
    assert heads() == ({"on logits": 1} if group.size() > 1 else {"fused": 1})
    dense = gpt.dense_cross_entropy(gpt.forward(model, batch, None), batch.labels)
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)


def test_ranks_that_differ_are_an_error_on_all(group):
    """The first one has a hook on its output layer: its collectives would be others than those of the rest."""
    megatron_patch.apply()
    model, batch = ask(gpt.make_model(group.size())), batch_for(group)
    if group.rank() == 0:
        model.output_layer.register_forward_hook(lambda *_: None)
    fusing = list(range(1, group.size()))
    with pytest.raises(RuntimeError, match=rf"ranks {re.escape(str(fusing))} .* ranks \[0\] compute it on logits"):
        gpt.forward(model, batch, batch.labels)


def test_a_look_of_one_rank_changes_nothing(group):
    model, batch = gpt.make_model(group.size()), batch_for(group)
    _, expected = gpt.loss_and_grads(model, batch, gpt.mean)
    megatron_patch.apply(strict=True)

    def loss_method(labels, logits):
        if group.rank() == 0:
            logits.max()
        return type(model).compute_language_model_loss(model, labels, logits)

    model.compute_language_model_loss = loss_method
    _, grads = gpt.loss_and_grads(ask(model), batch, gpt.mean)
    check_grads(grads, expected)


def test_a_layer_that_does_not_reduce(group):
    """disable_grad_reduce, and sequence parallelism switched off around a call."""
    megatron_patch.apply()
    model, batch = ask(gpt.make_model(group.size())), batch_for(group)
    model.output_layer.allreduce_dgrad, model.output_layer.disable_grad_reduce = False, True
    gpt.loss_and_grads(model, batch, gpt.mean)
    assert megatron_patch.status().reasons == ("the output layer does not reduce its input's gradient",)


def test_group_is_the_layers_own(group, monkeypatch):
    """Whatever the global groups are."""
    megatron_patch.apply(strict=True)
    model, batch, groups = ask(gpt.make_model(group.size())), batch_for(group), []
    dense = gpt.dense_loss(model, batch, group)
    real = linear.linear_cross_entropy_into

    def record(gradient, tensors, arguments, options):
        groups.append(arguments.group)
        return real(gradient, tensors, arguments, options)

    monkeypatch.setattr(linear, "linear_cross_entropy_into", record)
    if hasattr(model.output_layer, "tp_group"):
        monkeypatch.setattr(output_layer, "global_group", None)
    loss = gpt.forward(model, batch, batch.labels)
    assert groups == [group]
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)


def test_one_rank_of_a_stage_logs(group, caplog, monkeypatch):
    """Not rank 0 of all: with pipeline stages that one may have no loss."""
    from megatron_patch import log

    megatron_patch.apply()
    monkeypatch.setattr(log, "_rank", types.SimpleNamespace(fails=1))  # nobody asks for it
    caplog.clear()
    model, batch = ask(gpt.make_model(group.size())), batch_for(group)
    gpt.forward(model, batch, batch.labels)
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
    assert bool([r for r in caplog.records if "te_ce_linear" in r.getMessage()]) == first
