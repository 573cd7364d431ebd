"""Where the loss cannot be fused with the output layer: it is computed on logits, said once, or refused (strict)."""

from __future__ import annotations

import copy
import types

import megatron_gpt as gpt
import pytest
import torch
from fused_head import ask, check_grads, heads
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

import megatron_patch
from megatron_patch import PatchError
from te_ce import LossOptions

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]


class Adapter(torch.nn.Module):
    """A layer around the layer, as adapters put it."""

    def __init__(self, layer):
        super().__init__()
        self.to_wrap = layer

    def forward(self, *args, **kwargs):
        output, bias = self.to_wrap(*args, **kwargs)
        return output * 2.0, bias


class Changed(ColumnParallelLinear):
    """What `fully_shard` and quantisation make of the class."""


def adapt(model):
    model.output_layer = Adapter(model.output_layer)


def change_class(model):
    model.output_layer.__class__ = Changed


def own_forward(model):
    forward = model.output_layer.forward
    model.output_layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def own_forward_around_megatrons(model):
    layer = model.output_layer
    layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)


def forward_hook(model):
    model.output_layer.register_forward_hook(lambda *_: None)


def backward_hook(model):
    model.output_layer.register_full_backward_hook(lambda *_: None)


def backward_pre_hook(model):
    model.output_layer.register_full_backward_pre_hook(lambda *_: None)


def deferred_wgrad(model):
    """As far as the output layer's forward goes."""
    layer = model.output_layer
    layer.config = copy.copy(layer.config)
    layer.config.defer_embedding_wgrad_compute, layer.config.wgrad_deferral_limit = True, 0
    layer.embedding_activation_buffer = []


def offloading(model):
    model.config._cpu_offloading_context = types.SimpleNamespace(inside_context=True)
    model.config.cpu_offloading = False


def expert(model):
    model.output_layer.is_expert = True


def skipped_bias(model):
    model.output_layer.skip_bias_add = True
    model.output_layer.bias = torch.nn.Parameter(torch.zeros(gpt.VOCAB))


def sharded_weight(model):
    model.output_layer.gtp_remat_size = 2
    if hasattr(ColumnParallelLinear, "_forward_impl"):
        real = model.output_layer._forward_impl
        one_shard = lambda *args, gtp_remat_size=1, **kwargs: real(*args, **kwargs)  # noqa: E731
        model.output_layer._forward_impl = one_shard


def fsdp_weight(model):
    model.output_layer.weight.__fsdp_param__ = True


class Special(torch.nn.Parameter):
    """A parameter that is more than its values."""


def special_weight(model):
    model.output_layer.weight = Special(model.output_layer.weight.detach())


def own_dtype(model):
    model.output_layer.output_dtype = torch.float32


REASONS = {
    adapt: "the model's is Adapter",
    change_class: "the output layer is a Changed, not a plain ColumnParallelLinear",
    own_forward: "ColumnParallelLinear with a forward of its own",
    own_forward_around_megatrons: "the output layer has a forward of its own",
    forward_hook: "the output layer has hooks",
    backward_hook: "the output layer has hooks",
    backward_pre_hook: "the output layer has hooks",
    deferred_wgrad: "defer_embedding_wgrad_compute",
    offloading: "activations are offloaded",
    expert: "is an expert's",
    skipped_bias: "leaves its bias to the caller",
    fsdp_weight: "the weight is Megatron-FSDP's",
    special_weight: "the output layer's weight is a Special",
    own_dtype: "the logits have a dtype of their own",
    sharded_weight: "gtp_remat_size",
}

changes = pytest.mark.parametrize(("change", "reason"), REASONS.items(), ids=[change.__name__ for change in REASONS])


def said(caplog):
    messages = [record.getMessage() for record in caplog.records if record.name == "megatron_patch"]
    return [message for message in messages if "te_ce_linear" in message]


@changes
def test_on_logits(change, reason, caplog):
    model, batch = gpt.make_model(), gpt.make_batch(2, 8, (-100,))
    if change is adapt:  # the only one that changes values; with others Megatron's own loss doesn't run in float32
        change(model)
    _, expected = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    dense = gpt.dense_loss(model, batch)
    if change is not adapt:
        change(model)
        expected = {name: expected[name] for name, parameter in model.named_parameters() if name in expected}
    megatron_patch.apply()
    ask(model)
    for _ in range(2):
        loss, grads = gpt.loss_and_grads(model, batch, gpt.masked_sum)
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)
    check_grads(grads, expected)
    status = megatron_patch.status()
    assert status.heads == {"on logits": 2}
    assert len(status.reasons) == 1
    assert reason in status.reasons[0]
    assert f"on logits, because {status.reasons[0]}" in str(status)
    (message,) = said(caplog)
    assert message.endswith(f"the loss is computed on logits, because {status.reasons[0]}")


@changes
def test_strict(change, reason):
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    change(model)
    megatron_patch.apply(strict=True)
    with pytest.raises(PatchError, match=r'te_ce_linear: .*set cross_entropy_fusion_impl="te_ce"') as error:
        gpt.forward(model, batch, batch.labels)
    assert reason in str(error.value)
    gpt.forward(model, batch, None)  # no loss, nothing to fuse


@changes
def test_keep_that_cannot_be_honoured(change, reason):
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    change(model)
    megatron_patch.apply(keep=0.5)
    with pytest.raises(PatchError, match=r"te_ce_linear: keep=0.5 cannot be honoured: ") as error:
        gpt.forward(model, batch, batch.labels)
    assert reason in str(error.value)


def test_forward_pre_hooks_are_allowed():
    """Megatron's DDP has one on every module, to gather the parameters."""
    model, batch, seen = ask(gpt.make_model()), gpt.make_batch(2, 8), []
    model.output_layer.register_forward_pre_hook(lambda *_: seen.append(1))
    megatron_patch.apply(strict=True)
    gpt.forward(model, batch, batch.labels)
    assert seen == [1]


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # modules that return more than tensors
@pytest.mark.parametrize("register", ["forward", "full_backward", "full_backward_pre"])
def test_hooks_on_all_modules(register):
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    megatron_patch.apply()
    name = {"full_backward_pre": "register_module_full_backward_pre_hook"}.get(register)
    handle = getattr(torch.nn.modules.module, name or f"register_module_{register}_hook")(lambda *_: None)
    try:
        gpt.forward(model, batch, batch.labels)
    finally:
        handle.remove()
    gpt.forward(model, batch, batch.labels)
    assert megatron_patch.status().heads == {"on logits": 1, "fused": 1}


def test_hook_that_captures_logits_gets_them():
    """A distillation loss added later has its gradient."""
    model, batch, captured = gpt.make_model(), gpt.make_batch(2, 8), []
    model.output_layer.register_forward_hook(
        lambda _, __, output: captured.append(output[0] * 1.0)
    )  # Megatron overwrites

    def grads():
        captured.clear()
        return gpt.loss_and_grads(model, batch, lambda loss, _: loss.mean() + captured[0].softmax(-1).pow(2).sum())[1]

    expected = grads()
    megatron_patch.apply()
    ask(model)
    check_grads(grads(), expected)
    assert type(captured[0]) is Tensor


def test_autocast():
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    megatron_patch.apply()
    with torch.autocast("cpu", torch.bfloat16):
        gpt.forward(model, batch, batch.labels).mean().backward()
    assert megatron_patch.status().reasons == ("autocast is on",)


def test_options_that_are_not_for_it():
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    megatron_patch.apply(options=LossOptions(reproducible_tp=True))
    loss = gpt.forward(model, batch, batch.labels)
    torch.testing.assert_close(loss.double(), gpt.dense_loss(model, batch), rtol=0, atol=1e-5)
    assert megatron_patch.status().reasons == ("reproducible_tp is for the loss on logits",)


USES = {
    "in place": lambda x: x.mul_(0.5),
    "in place, no graph": lambda x: x.detach().mul_(0.5),
    "hook": lambda x: x.register_hook(lambda grad: None),
    "retain_grad": lambda x: x.retain_grad(),
    "metric": lambda x: x.max(),
    "loss of its own": lambda x: x.sum(),
}


@pytest.mark.parametrize("use", USES)
def test_logits_used_before_the_loss(use):
    """The loss takes what is there by then, changes in place included; a mere look changes nothing."""
    megatron_patch.apply()
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    model.compute_language_model_loss = lambda y, x: [
        USES[use](x),
        type(model).compute_language_model_loss(model, y, x),
    ][1]
    loss, grads = gpt.loss_and_grads(model, batch, gpt.mean)
    logits = gpt.forward(model, batch, None) * (0.5 if "place" in use else 1.0)
    torch.testing.assert_close(loss.double(), gpt.dense_cross_entropy(logits, batch.labels), rtol=0, atol=1e-5)
    assert grads["output_layer.weight"].any()
    if use in ("metric", "loss of its own"):
        assert heads() == {"fused": 1}
    else:
        reason = "the logits were changed, or their gradient asked for, before the loss"
        assert megatron_patch.status().reasons == (reason,)


def test_configuration_logger(tmp_path):
    """Megatron saves the logits, before their loss; what it saves are logits."""
    megatron_patch.apply(strict=True)
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    expected = gpt.forward(model, batch, None)
    model.config.config_logger_dir = str(tmp_path)
    loss = gpt.forward(model, batch, batch.labels)
    torch.testing.assert_close(loss.double(), gpt.dense_cross_entropy(expected, batch.labels), rtol=0, atol=1e-5)
    files = list(tmp_path.glob("*logits*.pth"))
    assert files
    saved = torch.load(files[0])["logits"]
    assert type(saved) is Tensor
    assert torch.equal(saved.transpose(0, 1), expected)


def test_logits_of_the_callers_own():
    megatron_patch.apply()
    model, batch = ask(gpt.make_model()), gpt.make_batch(2, 8)
    logits = torch.randn(8, 2, gpt.VOCAB)
    loss = model.compute_language_model_loss(batch.labels, logits)
    dense = gpt.dense_cross_entropy(logits.transpose(0, 1), batch.labels)
    torch.testing.assert_close(loss.double(), dense, rtol=0, atol=1e-5)
    assert megatron_patch.status().reasons == ("the logits were not made in a forward of the model with labels",)
