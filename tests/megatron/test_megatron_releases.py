"""The wiring against the shape of every release: where the group is, what the functions take, what the config has."""

from __future__ import annotations

import types

import pytest
import stub_megatron
import torch
import torch.nn.functional as F
from stub_megatron import RELEASES, make_model, module

import megatron_patch
from megatron_patch import linear, native, wiring
from te_ce.counters import served


class FakeGroup:
    """Something to be found again: the group that the loss is given."""

    def __init__(self, size=2):
        self._size = size

    def size(self):
        return self._size


@pytest.fixture(params=RELEASES.values(), ids=RELEASES)
def release(request, tmp_path, monkeypatch):
    """The stand-in package as `megatron.core` of this process; the real one afterwards."""
    with stub_megatron.installed(request.param, tmp_path, monkeypatch):
        yield request.param


@pytest.fixture
def calls(monkeypatch):
    """What te_ce was called with, in place of calling it."""
    seen = []

    def record(logits, target, *, group, options, inplace):
        seen.append(types.SimpleNamespace(logits=logits, target=target, group=group, options=options, inplace=inplace))
        return logits.sum(-1).float()

    for caller in (wiring, native):
        monkeypatch.setattr(caller, "vocab_parallel_cross_entropy", record)
    return seen


ASKING = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te_ce"}


def inputs(v=7):
    torch.manual_seed(0)
    return torch.randint(0, v, (2, 5)), torch.randn(5, 2, v, requires_grad=True)


def dense(labels, logits):
    return F.cross_entropy(logits.double().transpose(0, 1).flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)


def test_known_to_strict(release):
    megatron_patch.apply(replace_native=True, strict=True)
    status = megatron_patch.status()
    assert status.intact
    assert status.megatron == release.version
    assert {b.role for b in status.bindings} == {"loss", "config", "call", "layer", "native"}


def test_flag(release):
    megatron_patch.apply()
    labels, logits = inputs()
    before = served()["torch"]
    loss = make_model(release, **ASKING).compute_language_model_loss(labels, logits)
    assert served()["torch"] == before + 1
    torch.testing.assert_close(loss.double(), dense(labels, logits), rtol=0, atol=1e-6)


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("replace_native", [False, True])
def test_no_flag(release, fusion, replace_native):
    megatron_patch.apply(replace_native=replace_native)
    labels, logits = inputs()
    before = served()["torch"]
    loss = make_model(release, cross_entropy_loss_fusion=fusion).compute_language_model_loss(labels, logits)
    assert served()["torch"] == before + replace_native
    torch.testing.assert_close(loss.double(), dense(labels, logits), rtol=0, atol=1e-6)


def test_group_is_the_models(release, calls):
    megatron_patch.apply()
    group = FakeGroup()
    model = make_model(release, group, **ASKING)
    if release.holder:
        module("parallel_state").GROUP = FakeGroup()  # another: the model's own comes first
    labels, logits = inputs()
    model.compute_language_model_loss(labels, logits)
    assert calls[0].group is group
    assert calls[0].inplace == "auto"
    assert calls[0].logits is logits  # not a copy, not even a view


def test_group_is_the_global_one_where_the_model_has_none(release, calls):
    megatron_patch.apply()
    model = make_model(release, None, **ASKING)
    module("parallel_state").GROUP = group = FakeGroup()
    model.compute_language_model_loss(*inputs())
    assert calls[0].group is group


def test_no_group_at_all(release, calls):
    megatron_patch.apply()
    labels, logits = inputs()
    make_model(release, **ASKING).compute_language_model_loss(labels, logits)
    assert calls[0].group is None
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size is 2, but .* hold no tensor-parallel group"):
        make_model(release, tensor_model_parallel_size=2, **ASKING).compute_language_model_loss(labels, logits)


@pytest.mark.parametrize("fusion", [False, True])
def test_group_of_the_native_functions(release, calls, fusion):
    megatron_patch.apply(replace_native=True)
    model = make_model(release, FakeGroup(), cross_entropy_loss_fusion=fusion)
    module("parallel_state").GROUP = everybody = FakeGroup()
    model.compute_language_model_loss(*inputs())
    given = release.fused_takes_group if fusion else release.unfused_takes_group
    assert calls[0].group is (getattr(model, release.holder).tp if given and release.holder else everybody)


def test_native_functions_by_hand(release, calls):
    """Positional and by keyword, as far as the release's own signature goes."""
    megatron_patch.apply(replace_native=True)
    labels, logits = inputs()
    unfused = module("tensor_parallel").vocab_parallel_cross_entropy
    fused = module("models.common.language_module.language_module").fused_vocab_parallel_cross_entropy
    group = FakeGroup()
    unfused(logits, labels.t(), 0.1)
    unfused(vocab_parallel_logits=logits, target=labels.t(), label_smoothing=0.1)
    if release.unfused_takes_group:
        unfused(logits, labels.t(), 0.1, group)
        unfused(logits, labels.t(), label_smoothing=0.1, tp_group=group)
    assert {(c.options.label_smoothing, c.options.smoothing) for c in calls} == {(0.1, "others")}
    assert [c.group for c in calls[2:]] == [group] * len(calls[2:])
    calls.clear()
    if release.fused_takes_group:
        fused(logits, labels.t(), group)
        fused(logits, labels.t(), tp_group=group)
        assert [c.group for c in calls] == [group, group]
    else:
        fused(logits, labels.t())
        assert calls[0].group is None
    with pytest.raises(TypeError):
        fused(logits, labels.t(), no_such_argument=1)


def test_labels_are_a_view_with_the_negative_ones_ignored(release, calls):
    megatron_patch.apply()
    text = torch.tensor([[1, -1, -100, 3]])
    labels = text[:, 1:]  # one sequence, a slice: transposed it keeps the row stride of `text`
    make_model(release, **ASKING).compute_language_model_loss(labels, torch.randn(3, 1, 7))
    assert calls[0].target.flatten().tolist() == [-100, -100, 3]
    assert calls[0].target.shape == (3, 1)
    assert text.tolist() == [[1, -1, -100, 3]]


@pytest.fixture
def fused(monkeypatch):
    """What the fused linear loss was called with, besides calling it, in a group of one rank."""
    seen, real = [], linear.linear_cross_entropy_into

    def record(gradient, tensors, arguments, options):
        seen.append(types.SimpleNamespace(gradient=gradient, tensors=tensors, arguments=arguments))
        return real(gradient, tensors, arguments._replace(group=None), options)

    monkeypatch.setattr(linear, "linear_cross_entropy_into", record)
    return seen


LINEAR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te_ce_linear"}


def with_output_layer(release, group=None):
    model = make_model(release, group, **LINEAR)
    model.output_layer = module("tensor_parallel.layers").ColumnParallelLinear(3, 7, model.config, group)
    return model


def test_linear(release, fused):
    """The layer's input and weight, not its logits; every release has its group somewhere else."""
    megatron_patch.apply(strict=True)
    group = FakeGroup()
    model, labels, hidden = with_output_layer(release, group), inputs()[0], torch.randn(5, 2, 3, requires_grad=True)
    loss = model(hidden, labels)
    assert megatron_patch.status().heads == {"fused": 1}
    assert fused[0].tensors.hidden is hidden
    assert fused[0].tensors.weight is model.output_layer.weight
    assert fused[0].arguments.group is group
    assert not fused[0].arguments.sequence_parallel
    assert fused[0].gradient is None
    logits = model(hidden)
    torch.testing.assert_close(loss.double(), dense(labels, logits), rtol=0, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(loss.sum(), (hidden, model.output_layer.weight)),
        torch.autograd.grad(dense(labels, logits).sum(), (hidden, model.output_layer.weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_linear_obeys_the_layer(release, fused, monkeypatch):
    """Not the configuration: sequence parallelism is switched off on the layer where there is one rank."""
    megatron_patch.apply(strict=True)
    model, labels = with_output_layer(release, FakeGroup()), inputs()[0]
    model.output_layer.sequence_parallel, model.output_layer.allreduce_dgrad = True, False
    model.output_layer.gradient_accumulation_fusion = True
    monkeypatch.setattr(linear, "linear_cross_entropy_into", lambda *given: fused.append(given) or labels.t().float())
    shapes = []
    real = megatron_patch.wiring.linear_loss
    monkeypatch.setattr(megatron_patch.wiring, "linear_loss", lambda y, x, a: shapes.append(x.shape) or real(y, x, a))
    model(torch.randn(3, 2, 3), labels)
    gradient, tensors, arguments, _ = fused[0]
    assert arguments.sequence_parallel
    assert gradient is not None
    assert tensors.hidden.shape == (3, 2, 3)
    assert shapes == [(6, 2, 7)]


def test_linear_elsewhere_is_untouched(release):
    """Other layers, other models, other times."""
    megatron_patch.apply(strict=True)
    model, hidden = with_output_layer(release), torch.randn(5, 2, 3)
    other = module("tensor_parallel.layers").ColumnParallelLinear(3, 7, model.config)
    method = model.compute_language_model_loss
    model.compute_language_model_loss = lambda y, x: [type(other(hidden)[0]), method(y, x)]
    kind, _ = model(hidden, inputs()[0])
    assert kind is torch.Tensor
    assert type(model(hidden)) is torch.Tensor
    assert type(model.output_layer(hidden)[0]) is torch.Tensor


# Gathered logits: of the widths that a layer of 14 columns over 2 ranks knows, 7 is a shard.
LAYER = types.SimpleNamespace(output_size_per_partition=7, output_size=14)


def widths(model):
    """The places where a model keeps the widths of its logits."""
    yield "output_layer", lambda: setattr(model, "output_layer", LAYER)
    yield "lm_head", lambda: setattr(model, "lm_head", types.SimpleNamespace(output_layer=LAYER))
    yield "vocab_size", lambda: setattr(model, "vocab_size", 14)


@pytest.mark.parametrize("place", ["output_layer", "lm_head", "vocab_size"])
@pytest.mark.parametrize("replace_native", [False, True])
def test_gathered_logits(release, calls, place, replace_native):
    megatron_patch.apply(replace_native=replace_native)
    model = make_model(release, FakeGroup(), **({} if replace_native else ASKING))
    module("parallel_state").GROUP = FakeGroup()
    dict(widths(model))[place]()
    labels = torch.zeros(2, 5, dtype=torch.int64)
    for width, single in ((7, False), (14, True)):
        model.compute_language_model_loss(labels, torch.randn(5, 2, width))
        assert (calls[-1].group is None) == single
    with pytest.raises(ValueError, match=r"expected 7 columns .* or 14 \(gathered\).* got 9"):
        model.compute_language_model_loss(labels, torch.randn(5, 2, 9))


def test_configuration(release):
    megatron_patch.apply()
    model = make_model(release)
    assert model.config.checked  # Megatron's own __post_init__ ran
    model.config.cross_entropy_fusion_impl = "te_ce"
    with pytest.raises(ValueError, match="set cross_entropy_loss_fusion=True"):
        model.compute_language_model_loss(*inputs())
    if release.implementation_field:
        with pytest.raises(ValueError, match="set cross_entropy_loss_fusion=True"):
            make_model(release, cross_entropy_fusion_impl="te_ce")
