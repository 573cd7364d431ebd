"""The linear loss among torch's modes: who wants a gradient, autocast, checkpoints, hooks, finite differences."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from te_ce import LossOptions, linear_cross_entropy
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.bits import same_bits
from tests.support.linear import INPUTS, Inputs, LinearCase, call, check_gradients, truth_of
from tests.support.linear_cases import linear_case
from tests.support.subject import Subject

_PLAIN = linear_case("plain")
_COMBINATIONS = [names for count in range(4) for names in itertools.combinations(INPUTS, count)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["enable_grad", "no_grad", "inference_mode"])
@pytest.mark.parametrize("keep", ["recompute", 0.5])
def test_the_gradients_asked_for_and_no_others(twin: Subject, mode: str, weighted: bool, keep: Any) -> None:
    if weighted and keep != "recompute":
        return
    more = {"token_weights": torch.ones(2, 3, device=twin.device), "reduction": "sum"} if weighted else {"keep": keep}
    first, grads = None, {}
    for without in _COMBINATIONS:
        inputs = _PLAIN.draw(twin.device).leaves(*without)
        with _PLAIN.cut(), getattr(torch, mode)():
            loss = call(twin, inputs, options=None, **more)
        first = loss if first is None else first
        assert same_bits(loss.detach(), first.detach())
        assert loss.requires_grad == (mode == "enable_grad" and len(without) < 3)
        if not loss.requires_grad:
            continue
        loss.sum().backward()
        for name, leaf in zip(INPUTS, inputs[:3], strict=True):
            assert (leaf.grad is not None) == (name not in without)
            if leaf.grad is not None:
                assert torch.equal(leaf.grad, grads.setdefault(name, leaf.grad))
    assert len(grads) == (3 if mode == "enable_grad" else 0)


def test_parameters_made_in_inference_mode(twin: Subject) -> None:
    with torch.inference_mode():
        inputs = _PLAIN.draw(twin.device)
        loss = call(twin, inputs)
    # Without a gradient, also outside.
    assert torch.equal(call(twin, inputs), loss)


def _autocast_layers(subject: Subject, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = _PLAIN.draw(subject.device)
    before = torch.eye(12, device=subject.device).requires_grad_()
    assert inputs.bias is not None
    layer = (inputs.weight.to(weight_dtype).requires_grad_(), inputs.bias.to(weight_dtype).requires_grad_())
    return inputs.hidden.requires_grad_(), before, *layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_autocast(twin: Subject, dtype: torch.dtype, weight_dtype: torch.dtype, inside: bool, weighted: bool) -> None:
    """As the unfused pair: GEMMs in autocast's dtype, the loss in float32, gradients in the dtypes of the leaves."""
    results = []
    target = _PLAIN.draw(twin.device).target
    for fused in (True, False):
        x, before, weight, bias = _autocast_layers(twin, weight_dtype)
        with torch.autocast(twin.device.type, dtype):
            hidden = F.linear(x, before)
            assert hidden.dtype == dtype
            if not fused:
                loss = F.cross_entropy(
                    F.linear(hidden, weight, bias).float().view(-1, 37), target.view(-1), reduction="sum"
                )
            else:
                more = {"token_weights": torch.ones_like(target).bool()} if weighted else {"keep": 0.5}
                with twin.serving(), _PLAIN.cut():
                    loss = linear_cross_entropy(hidden, weight, target, bias=bias, reduction="sum", **more)
            assert loss.dtype == torch.float32
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append([loss.detach(), x.grad, before.grad, weight.grad, bias.grad])
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        assert (got.double() - expected.double()).norm() <= 0.01 * expected.double().norm()


def test_autocast_with_hidden_in_float32(subject: Subject) -> None:
    """Weight in bfloat16: an error outside of autocast; within, both are cast."""
    inputs = _PLAIN.draw(subject.device)
    inputs = inputs._replace(weight=inputs.weight.bfloat16(), bias=None).leaves()
    with pytest.raises(TypeError, match=r"weight: expected float32, .*under torch\.autocast"):
        call(subject, inputs)
    with torch.autocast(subject.device.type, torch.bfloat16):
        loss = call(subject, inputs)
    loss.sum().backward()
    assert inputs.hidden.grad.dtype == torch.float32
    assert inputs.weight.grad.dtype == torch.bfloat16
    half = inputs._replace(hidden=inputs.hidden.detach().bfloat16())
    assert torch.equal(call(subject, half), loss)


def test_float64_is_left_alone_by_autocast(twin: Subject) -> None:
    inputs = _PLAIN.draw(twin.device, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = call(twin, inputs)
    assert loss.dtype == torch.float64
    assert torch.equal(loss, call(twin, inputs))


def _check_plain(subject: Subject, inputs: Inputs) -> None:
    ones = torch.ones_like(inputs.target, dtype=torch.float32)
    grads = {name: leaf.grad for name, leaf in zip(INPUTS, inputs[:3], strict=True)}
    check_gradients(subject, inputs, grads, truth_of(inputs, OutputGrads(ones)))


@pytest.mark.parametrize("keep", ["recompute", 0.5, "weighted"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(twin: Subject, use_reentrant: bool, keep: Any) -> None:
    inputs = _PLAIN.draw(twin.device).leaves()
    more = {"keep": keep}
    if keep == "weighted":
        more = {"token_weights": torch.ones(2, 3, device=twin.device), "reduction": "sum", "options": None}

    def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        loss: Tensor = call(twin, inputs._replace(hidden=hidden * 1.0, weight=weight, bias=bias), **more)
        return loss

    with _PLAIN.cut(), twin.serving():
        loss = torch.utils.checkpoint.checkpoint(loss_of, *inputs[:3], use_reentrant=use_reentrant)
        loss.sum().backward(retain_graph=True)
        _check_plain(twin, inputs)
        first = [leaf.grad.clone() for leaf in inputs[:3]]
        loss.sum().backward()
    for leaf, grad in zip(inputs[:3], first, strict=True):
        assert torch.equal(leaf.grad, 2 * grad)


@pytest.mark.parametrize("keep", ["recompute", 0.5, "weighted"])
def test_saved_tensors_elsewhere(twin: Subject, keep: Any) -> None:
    inputs = _PLAIN.draw(twin.device).leaves()
    more = {"keep": keep}
    if keep == "weighted":
        more = {"token_weights": torch.ones(2, 3, device=twin.device), "reduction": "sum", "options": None}
    saved = []

    def pack(tensor: Tensor) -> Any:
        saved.append(tensor)
        return tensor.numpy(force=True).copy() if tensor.dtype != torch.bfloat16 else tensor.clone()

    with _PLAIN.cut(), torch.autograd.graph.saved_tensors_hooks(pack, torch.as_tensor):
        loss = call(twin, inputs, **more).sum()
    loss.backward()
    _check_plain(twin, inputs)
    if keep != "weighted":
        # Kept logits, and what the docstring names: nothing else.
        kept = 1 if keep == 0.5 else 0
        assert len(saved) == 5 + kept
    inputs = _PLAIN.draw(twin.device).leaves()
    with _PLAIN.cut(), torch.autograd.graph.save_on_cpu():
        loss = call(twin, inputs, **more).sum()
    loss.backward()
    _check_plain(twin, inputs)


_ALL = LossOptions(
    scale=1.3, softcap=2.0, z_loss_weight=0.1, label_smoothing=0.1, smoothing="others", vocab_size=5, reduction="mean"
)
_OPTIONS = {
    "plain": LossOptions(),
    "scale": LossOptions(scale=-0.7),
    "row_scale": LossOptions(scale=torch.tensor([0.5, -1.3, 2.0, 1.0])),
    "softcap": LossOptions(softcap=1.5),
    "z_loss": LossOptions(z_loss_weight=0.3, reduction="sum"),
    "uniform": LossOptions(label_smoothing=0.2),
    "all": _ALL,
}


@pytest.mark.parametrize("keep", ["recompute", 0.5, 1.0])
@pytest.mark.parametrize("name", _OPTIONS)
def test_finite_differences(twin: Subject, name: str, keep: Any) -> None:
    case = LinearCase("check", _OPTIONS[name], torch.float64, rows=(4,), hidden_size=3, columns=7, chunk_columns=3)
    inputs = case.draw(twin.device)
    target = torch.tensor([0, 4, -100, 2])

    def values(*leaves: Tensor) -> tuple[Tensor, ...]:
        got = call(twin, Inputs(*leaves, target, case.options, inputs.grads), keep=keep, outputs=OUTPUTS)
        return got.loss, got.log_probs, got.entropy, got.lse

    with case.cut():
        assert torch.autograd.gradcheck(values, inputs.leaves()[:3])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", _OPTIONS)
def test_finite_differences_of_weighted_tokens(twin: Subject, name: str, reduction: Any) -> None:
    options = dataclasses.replace(_OPTIONS[name], reduction=reduction)
    case = LinearCase("check", options, torch.float64, rows=(4,), hidden_size=3, columns=7, chunk_tokens=3)
    inputs = case.draw(twin.device)
    weights = torch.tensor([0.5, -2.0, 3.0, 1.0])
    target = torch.tensor([0, 4, -100, 2])

    def value(*leaves: Tensor) -> Tensor:
        loss: Tensor = call(twin, Inputs(*leaves, target, options, inputs.grads), token_weights=weights)
        return loss

    with case.cut():
        assert torch.autograd.gradcheck(value, inputs.leaves()[:3])


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_any_layout_of_the_incoming_gradient(subject: Subject, layout: str) -> None:
    inputs = _PLAIN.draw(subject.device).leaves()
    g = inputs.grads.loss
    assert g is not None
    with _PLAIN.cut(), subject.serving():
        loss = call(subject, inputs)
        if layout == "transposed":
            (loss.t().contiguous() * g.t()).sum().backward()
        else:
            g = g[:, :1].expand(2, 3) if layout == "expanded" else torch.stack([g, g], -1)[..., 1]
            loss.backward(g)
    grads = {name: leaf.grad for name, leaf in zip(INPUTS, inputs[:3], strict=True)}
    check_gradients(subject, inputs, grads, truth_of(inputs, OutputGrads(g)))


def test_one_weight_for_two_losses(twin: Subject) -> None:
    inputs = _PLAIN.draw(twin.device).leaves()
    with _PLAIN.cut(), twin.serving():
        first = call(twin, inputs, keep=1.0).sum()
        second = call(twin, inputs._replace(hidden=inputs.hidden * 1.0), keep=1.0).sum()
        (first + second).backward()
    for leaf in inputs[:3]:
        leaf.grad /= 2
    _check_plain(twin, inputs)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_can_be_changed_in_place(twin: Subject, weighted: bool) -> None:
    inputs = _PLAIN.draw(twin.device).leaves()
    more = {"token_weights": torch.ones(2, 3, device=twin.device), "reduction": "sum", "options": None}
    with _PLAIN.cut():
        loss = call(twin, inputs, **(more if weighted else {}))
        loss *= 0.5
        loss.sum().backward()
    for leaf in inputs[:3]:
        leaf.grad *= 2
    _check_plain(twin, inputs)
