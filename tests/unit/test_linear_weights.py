"""token_weights: one scalar, gradients made in forward, each backward a product with the scalar from above."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import te_ce
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.bounds import check_predictions, check_value
from tests.support.broken_linear import BROKEN_STEPS, BROKEN_WALKS, broken_subject, sum_rounded_with_every_chunk
from tests.support.linear import INPUTS, Inputs, LinearCase, call, check_gradients, truth_of
from tests.support.linear_cases import LINEAR_CASES, LINEAR_PAIRS, linear_case
from tests.support.subject import Subject


def _weights(case: LinearCase, subject: Subject, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of either sign, one of them 0."""
    random = torch.Generator().manual_seed(37)
    weights = (torch.randn(case.rows, generator=random) * 16).round() / 16
    weights.view(-1)[-1] = 0.0
    return weights.to(subject.device, dtype)


def _counted(inputs: Inputs, reduction: str) -> int:
    return max(1, int((inputs.target != inputs.options.ignore_index).sum())) if reduction == "mean" else 1


def check_weighted(subject: Subject, case: LinearCase, reduction: str, upstream: float = -1.75) -> None:
    """The scalar, every output, and the gradients under an upstream scalar."""
    inputs, weights = case.draw(subject.device).leaves(), _weights(case, subject)
    with case.cut():
        options = dataclasses.replace(inputs.options, reduction=reduction)
        got = call(subject, inputs, options=options, token_weights=weights, outputs=OUTPUTS)
    with subject.serving():
        got.loss.backward(torch.tensor(upstream, device=subject.device))
    count = _counted(inputs, reduction)
    g = weights.double() * upstream / count
    truth = truth_of(inputs, OutputGrads(g))
    for name in OUTPUTS[:4]:
        assert getattr(got, name).shape == inputs.target.shape
        check_value(name, getattr(got, name), truth.rows, inputs.target, inputs.options)
    check_predictions(got.predictions, truth.rows, inputs.options)
    of_rows = (weights.cpu().double().reshape(-1) * truth.rows.loss) / count
    assert got.loss.shape == ()
    error = abs(float(got.loss.detach()) - float(of_rows.sum()))
    assert error <= 1e-6 * float(of_rows.abs().sum()) + 1e-6, f"loss: error {error:.3g}"
    grads = {name: each.grad for name, each in zip(INPUTS, inputs[:3], strict=True) if each is not None}
    check_gradients(subject, inputs, grads, truth)


@pytest.mark.parametrize("case", LINEAR_CASES[::3], ids=str)
def test_values_and_gradients_match_float64(subject: Subject, case: LinearCase) -> None:
    check_weighted(subject, case, "mean" if len(case.name) % 2 else "sum")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("case", [*LINEAR_CASES, *LINEAR_PAIRS], ids=str)
def test_all_options_on_the_twin(twin: Subject, case: LinearCase, reduction: str) -> None:
    check_weighted(twin, case, reduction)


@pytest.mark.parametrize("chunk_columns", [10, 1, 37])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 6, 100])
def test_tokens_and_columns_cut_anyhow(twin: Subject, chunk_tokens: int, chunk_columns: int) -> None:
    case = dataclasses.replace(linear_case("all"), chunk_tokens=chunk_tokens, chunk_columns=chunk_columns)
    check_weighted(twin, case, "sum")


@pytest.mark.parametrize("case", ["all", "all_bf16_row_scale"])
@pytest.mark.parametrize("broken", BROKEN_WALKS)
def test_a_broken_walk_is_refused(twin: Subject, broken: str, case: str) -> None:
    with BROKEN_WALKS[broken](), pytest.raises(AssertionError):
        check_weighted(twin, linear_case(case), "mean")


_OF_THE_LOSS = [name for name in BROKEN_STEPS if not any(part in name for part in ("entropy", "log_probs", "lse_"))]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("broken", _OF_THE_LOSS)
def test_a_lost_option_is_refused(twin: Subject, broken: str, reduction: str) -> None:
    with pytest.raises(AssertionError):
        check_weighted(broken_subject(twin, broken), linear_case("all"), reduction)


def check_long_sums(subject: Subject) -> None:
    """A weight's gradient that is the sum of many small equal terms; a bfloat16 sum stops growing at 256 of them."""
    case = LinearCase("many", dtype=torch.bfloat16, rows=(700,), hidden_size=2, columns=3, chunk_tokens=1)
    inputs = case.draw(subject.device)
    inputs = inputs._replace(
        hidden=torch.ones_like(inputs.hidden), bias=None, target=torch.zeros_like(inputs.target)
    ).leaves()
    ones = torch.ones(700, device=subject.device)
    with case.cut():
        call(subject, inputs, token_weights=ones, reduction="sum", options=None).backward()
    truth = truth_of(inputs, OutputGrads(ones))
    check_gradients(subject, inputs, {"hidden": inputs.hidden.grad, "weight": inputs.weight.grad}, truth)


def test_long_sums_are_kept_in_float32(twin: Subject) -> None:
    check_long_sums(twin)
    with sum_rounded_with_every_chunk(), pytest.raises(AssertionError):
        check_long_sums(twin)


def _loss(subject: Subject, inputs: Inputs, weights: Any, **keywords: Any) -> Any:
    keywords = {"reduction": "sum", "options": None, **keywords}
    with linear_case("plain").cut():
        return call(subject, inputs, token_weights=weights, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_backward_leaves_what_an_earlier_one_gave(subject: Subject, dtype: torch.dtype) -> None:
    case = linear_case("plain")
    inputs = case.draw(subject.device, dtype).leaves()
    loss = _loss(subject, inputs, _weights(case, subject))
    with subject.serving():
        first = torch.autograd.grad(loss, inputs.grad_leaves(), retain_graph=True)
        before = [each.clone() for each in first]
        doubled = torch.autograd.grad(loss, inputs.grad_leaves(), loss.new_tensor(-2.0), retain_graph=True)
        for each in first:
            each.mul_(3)
        again = torch.autograd.grad(loss * 1.0, inputs.grad_leaves())
    for one, two, three in zip(before, doubled, again, strict=True):
        # Powers of two are exact.
        assert torch.equal(two, -2 * one)
        assert torch.equal(three, one)


def test_a_power_of_the_loss(subject: Subject) -> None:
    case = linear_case("plain")
    inputs, weights = case.draw(subject.device).leaves(), _weights(case, subject)
    loss = _loss(subject, inputs, weights)
    with subject.serving():
        (loss**2).backward()
    truth = truth_of(inputs, OutputGrads(weights * 2 * loss.detach()))
    check_gradients(subject, inputs, {name: each.grad for name, each in zip(INPUTS, inputs[:3], strict=True)}, truth)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_any_dtype(twin: Subject, dtype: torch.dtype) -> None:
    case = linear_case("plain")
    weights = _weights(case, twin).to(dtype)
    results = []
    for each in (weights, weights.float()):
        inputs = case.draw(twin.device).leaves()
        loss = _loss(twin, inputs, each)
        loss.backward()
        results.append((loss.detach(), *(leaf.grad for leaf in inputs.grad_leaves())))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("strides", ["transposed", "expanded"])
def test_weights_of_any_strides(twin: Subject, strides: str) -> None:
    case = linear_case("plain")
    row = _weights(case, twin)
    weights = row.t().contiguous().t() if strides == "transposed" else row[:1].expand(case.rows)
    assert not weights.is_contiguous()
    losses = [_loss(twin, case.draw(twin.device), each) for each in (weights, weights.contiguous())]
    assert torch.equal(*losses)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7.0])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_weights_of_ignored_rows_add_nothing(subject: Subject, reduction: str, value: float) -> None:
    case = linear_case("plain")
    weights = _weights(case, subject)
    results = []
    for of_ignored in (value, 0.0):
        inputs = case.draw(subject.device).leaves()
        weights = torch.where(inputs.target == -100, of_ignored, weights)
        loss = _loss(subject, inputs, weights, reduction=reduction)
        loss.backward()
        results.append((loss.detach(), *(leaf.grad for leaf in inputs.grad_leaves())))
    assert torch.isfinite(results[0][0])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("nothing", ["zero_weights", "all_ignored", "no_rows"])
def test_nothing_to_learn(subject: Subject, nothing: str, reduction: str) -> None:
    rows = (0,) if nothing == "no_rows" else (2, 3)
    target = torch.full(rows, -100 if nothing == "all_ignored" else 2, device=subject.device)
    case = LinearCase("nothing", rows=(2, 3), columns=7)
    inputs = case.draw(subject.device)
    hidden = inputs.hidden.reshape(-1, 12)[:0] if nothing == "no_rows" else inputs.hidden
    inputs = inputs._replace(hidden=hidden, target=target).leaves()
    weights = torch.zeros(rows, device=subject.device) if nothing == "zero_weights" else None
    weights = torch.ones(rows, device=subject.device) if weights is None else weights
    got = _loss(subject, inputs, weights, reduction=reduction, outputs=OUTPUTS)
    assert got.loss.item() == 0.0
    assert all(getattr(got, name).shape == rows for name in OUTPUTS)
    got.loss.backward()
    for leaf in inputs.grad_leaves():
        assert leaf.grad is not None
        assert (leaf.grad == 0).all()
        assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("name", ["log_probs", "entropy", "lse"])
def test_outputs_are_not_differentiable(twin: Subject, name: str) -> None:
    case = linear_case("plain")
    inputs = case.draw(twin.device).leaves()
    got = _loss(twin, inputs, _weights(case, twin), outputs=OUTPUTS)
    for total in (getattr(got, name).sum(), got.loss + getattr(got, name).sum()):
        with pytest.raises(RuntimeError, match=r"output of the linear loss with token_weights was differentiated"):
            total.backward(retain_graph=True)
    assert not got.z_loss.requires_grad
    assert not got.predictions.requires_grad
    got.loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_same_bits_whoever_wants_a_gradient(twin: Subject, mode: Any) -> None:
    case = linear_case("plain_bf16")
    weights = _weights(case, twin)
    expected = _loss(twin, case.draw(twin.device).leaves(), weights)
    for without in ((), ("hidden",), ("weight", "bias"), INPUTS):
        inputs = case.draw(twin.device).leaves(*without)
        with mode():
            loss = _loss(twin, inputs, weights)
        assert torch.equal(loss, expected)
        wanted = [leaf for leaf in inputs.grad_leaves() if mode is torch.enable_grad]
        assert loss.requires_grad == bool(wanted)
        if wanted:
            loss.backward()
            assert all((leaf.grad is not None) == leaf.requires_grad for leaf in inputs[:3])


def test_the_gradient_cannot_be_differentiated_again(twin: Subject) -> None:
    for without in ((), ("hidden", "weight"), ("weight", "bias"), ("hidden", "bias")):
        inputs = linear_case("plain").draw(twin.device).leaves(*without)
        loss = _loss(twin, inputs, _weights(linear_case("plain"), twin))
        loss = loss + sum((leaf**2).sum() for leaf in inputs.grad_leaves())
        grads = torch.autograd.grad(loss, inputs.grad_leaves(), create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated again"):
            torch.autograd.grad(sum((grad**2).sum() for grad in grads), inputs.grad_leaves(), allow_unused=True)


def test_keep_has_no_effect_and_says_so(twin: Subject) -> None:
    case = linear_case("plain")
    inputs = case.draw(twin.device)
    with pytest.warns(UserWarning, match="keep: has no effect with token_weights"):
        loss = _loss(twin, inputs, _weights(case, twin), keep=0.5)
    assert torch.equal(loss, _loss(twin, inputs, _weights(case, twin)))


@pytest.mark.parametrize(
    ("weights", "keywords", "error", "message"),
    [
        ([1.0], {}, TypeError, "token_weights: expected a torch.Tensor, got list"),
        (torch.ones(2, 3, dtype=torch.int64), {}, TypeError, "token_weights: expected bools or floats, got int64"),
        (torch.ones(3, 2), {}, ValueError, r"token_weights: expected shape \(2, 3\) on cpu, .* got \(3, 2\) on cpu"),
        (torch.ones(()), {}, ValueError, r"token_weights: expected shape \(2, 3\)"),
        (torch.ones(2, 3, device="meta"), {}, ValueError, "token_weights: expected a dense tensor with storage"),
        (torch.ones(2, 3).to_sparse(), {}, ValueError, "token_weights: expected a dense tensor"),
        (torch.ones(2, 3, requires_grad=True), {}, ValueError, "token_weights: .* without requires_grad"),
        (torch.ones(2, 3), {"reduction": "none"}, ValueError, 'reduction: expected "sum" or "mean" with token_weights'),
    ],
)
def test_wrong_weights(twin: Subject, weights: Any, keywords: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        _loss(twin, linear_case("plain").draw(twin.device), weights, **keywords)


def test_small_weights_leave_the_gradient_its_digits(subject: Subject) -> None:
    """float16 has none below 6e-8, and w (p - [i = y]) is there before the scale of the loss arrives."""
    random = torch.Generator().manual_seed(4)
    hidden = torch.randn(6, 8, generator=random).half().to(subject.device)
    weight = torch.randn(40, 8, generator=random).half().to(subject.device)
    target = torch.randint(40, (6,), generator=random).to(subject.device)
    target[1] = -100
    results = []
    for size in (1.0, 2.0**-17, 2.0**-30):
        weights = torch.tensor([1.0, torch.nan, 0.5, 0.75, 0.0, 1.0], device=subject.device) * size
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with subject.serving():
            loss = te_ce.linear_cross_entropy(*leaves, target, token_weights=weights, reduction="sum")
        loss.backward(torch.tensor(1 / size, device=subject.device))
        results.append((loss.detach() / size, leaves[0].grad, leaves[1].grad))
    for scaled in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(scaled, results[0], strict=True))
    assert (results[0][2] != 0).any(-1).all()
