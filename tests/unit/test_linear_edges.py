"""The linear loss at the edges: nothing to do, one of everything, rows and columns that must not be heard of."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, VocabShard
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.linear import INPUTS, Inputs, LinearCase, call, check, cut_into, run, truth_of
from tests.support.subject import Subject

_ROWS = LinearCase("rows", rows=(5,), columns=20, chunk_columns=8)


@pytest.mark.parametrize("keep", ["recompute", 1.0])
@pytest.mark.parametrize("rows", [(0,), (2, 0)], ids=str)
def test_no_rows(subject: Subject, rows: tuple[int, ...], keep: Any) -> None:
    case = dataclasses.replace(_ROWS, rows=(4,))
    inputs = case.draw(subject.device)
    hidden = inputs.hidden.new_empty((*rows, 12))
    for reduction in ("none", "sum", "mean"):
        leaves = inputs._replace(hidden=hidden, target=inputs.target.new_empty(rows)).leaves()
        with case.cut(), subject.serving():
            options = LossOptions(reduction=reduction, label_smoothing=0.1)  # type: ignore[arg-type]
            got = call(subject, leaves, keep=keep, options=options, outputs=OUTPUTS)
            assert got.loss.shape == (rows if reduction == "none" else ())
            assert got.loss.sum().item() == 0.0
            assert all(getattr(got, name).shape == rows for name in OUTPUTS)
            got.loss.sum().backward()
        for leaf in leaves[:3]:
            assert leaf.grad.shape == leaf.shape
            assert (leaf.grad == 0).all()


@pytest.mark.parametrize("keep", ["recompute", 1.0])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_all_rows_ignored(subject: Subject, reduction: str, keep: Any) -> None:
    inputs = _ROWS.draw(subject.device)
    inputs = inputs._replace(target=torch.full_like(inputs.target, -100)).leaves()
    with _ROWS.cut(), subject.serving():
        options = LossOptions(reduction=reduction, z_loss_weight=0.1)  # type: ignore[arg-type]
        got = call(subject, inputs, keep=keep, options=options, outputs=("entropy", "predictions"))
        assert (got.loss == 0).all()
        assert (got.entropy == 0).all()
        expected = (inputs.hidden @ inputs.weight.t() + inputs.bias).argmax(-1)
        assert torch.equal(got.predictions, expected)
        (got.loss.sum() + got.entropy.sum()).backward()
    assert all((leaf.grad == 0).all() for leaf in inputs[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("columns", "hidden_size"), [(1, 12), (2, 1), (3, 13), (33, 7)])
def test_odd_sizes(subject: Subject, columns: int, hidden_size: int, dtype: torch.dtype) -> None:
    case = LinearCase("odd", LossOptions(), dtype, columns=columns, hidden_size=hidden_size, chunk_columns=16)
    case = dataclasses.replace(case, rows=(3,))
    inputs = case.draw(subject.device)
    with case.cut() as keep:
        check(subject, inputs, run(subject, inputs, keep=keep))


@pytest.mark.parametrize("columns", [130, 3])
@pytest.mark.parametrize("logit", [-30.0, 30.0])
def test_lanes_past_the_vocabulary_do_not_count(subject: Subject, logit: float, columns: int) -> None:
    """As if they were logits of 0."""
    hidden = torch.ones(2, 3, device=subject.device)
    weight = torch.full((columns, 3), logit / 4, device=subject.device)
    bias = torch.full((columns,), logit / 4, device=subject.device)
    target = torch.tensor([0, columns - 1], device=subject.device)
    inputs = Inputs(hidden, weight, bias, target, LossOptions(), OutputGrads(None))
    for chunk_columns in (None, 100):
        with cut_into(chunk_columns):
            loss = call(subject, inputs)
            weighted = call(
                subject, inputs, token_weights=torch.ones_like(target).bool(), reduction="sum", options=None
            )
        assert (loss - math.log(columns)).abs().max() < 1e-5
        assert abs(weighted.item() - 2 * math.log(columns)) < 1e-5


@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_padding_is_masked_after_all_transforms(subject: Subject, cap: float) -> None:
    hidden = torch.ones(1, 2, device=subject.device)
    weight = torch.full((100, 2), -25.0, device=subject.device)
    target = torch.zeros(1, dtype=torch.int64, device=subject.device)
    inputs = Inputs(
        hidden, weight, None, target, LossOptions(softcap=cap, scale=-1.0, vocab_size=90), OutputGrads(None)
    )
    with cut_into(40):
        assert abs(call(subject, inputs).item() - math.log(90)) < 1e-5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_padding_rows_of_the_weight_take_no_part(subject: Subject, value: float, weighted: bool) -> None:
    case = LinearCase("padding", LossOptions(vocab_size=17, z_loss_weight=0.1), columns=24, chunk_columns=10, keep=0.5)
    inputs = case.draw(subject.device)
    assert inputs.bias is not None
    inputs.weight[17:] = value
    inputs.bias[17:] = value
    with case.cut() as keep:
        if not weighted:
            check(subject, inputs, run(subject, inputs, keep=keep))
            return
        leaves = inputs.leaves()
        options = dataclasses.replace(inputs.options, reduction="sum")
        call(subject, leaves, options=options, token_weights=torch.ones(case.rows, device=subject.device)).backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves[:3])
    assert all((leaf.grad[17:] == 0).all() for leaf in leaves[1:3])
    assert (leaves.weight.grad[:17] != 0).any()


def _with_hidden_row(subject: Subject, row: int, value: float) -> Inputs:
    inputs = _ROWS.draw(subject.device)
    inputs.target[:] = torch.tensor([0, -100, 19, 3, -100])
    inputs.hidden[row] = value
    return inputs


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_ignored_row_that_is_not_finite(subject: Subject, value: float) -> None:
    """Its loss and dhidden are 0. dweight = G^T hidden sums 0 x NaN over the rows, as an output layer's own does."""
    clean = _with_hidden_row(subject, 1, 0.0)
    inputs = _with_hidden_row(subject, 1, value)
    with _ROWS.cut() as keep:
        expected, result = run(subject, clean, keep=keep), run(subject, inputs, keep=keep)
    for name in ("loss", "log_probs", "entropy", "lse", "z_loss"):
        assert torch.equal(result.values[name], expected.values[name])
        assert result.values[name][1] == 0
    assert torch.equal(result.grads["hidden"], expected.grads["hidden"])
    assert (result.grads["hidden"][1] == 0).all()
    assert torch.equal(result.grads["bias"], expected.grads["bias"])
    assert result.grads["weight"].isnan().all()


def test_a_row_that_is_nan_is_nan_alone(subject: Subject) -> None:
    clean, inputs = _with_hidden_row(subject, 2, 0.0), _with_hidden_row(subject, 2, math.nan)
    with _ROWS.cut() as keep:
        expected, result = run(subject, clean, keep=keep), run(subject, inputs, keep=keep)
    others = torch.tensor([0, 1, 3, 4], device=subject.device)
    assert result.values["loss"][2].isnan()
    assert result.grads["hidden"][2].isnan().all()
    assert torch.equal(result.values["loss"][others], expected.values["loss"][others])
    assert torch.equal(result.grads["hidden"][others], expected.grads["hidden"][others])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("bad", [20, 2**31 - 1, -1, -(2**31)])
def test_a_bad_target_is_nan_in_its_row_alone(subject: Subject, bad: int, dtype: torch.dtype) -> None:
    clean = _with_hidden_row(subject, 1, 0.0)
    inputs = clean._replace(target=clean.target.to(dtype).index_fill(0, torch.tensor([2], device=subject.device), bad))
    with _ROWS.cut() as keep:
        expected, result = run(subject, clean, keep=keep), run(subject, inputs, keep=keep)
    others = torch.tensor([0, 1, 3, 4], device=subject.device)
    assert result.values["loss"][2].isnan()
    assert result.grads["hidden"][2].isnan().all()
    assert torch.equal(result.values["loss"][others], expected.values["loss"][others])
    assert torch.equal(result.grads["hidden"][others], expected.grads["hidden"][others])
    with pytest.raises(IndexError, match=rf"target: rank 0 has 1 bad row\(s\), the first is row 2 with target {bad}"):
        call(subject, inputs, options=LossOptions(check_targets=True))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions(twin: Subject, reduction: str) -> None:
    """The mean is over the rows not ignored; smoothing and z-loss of ignored rows add nothing."""
    inputs = _with_hidden_row(twin, 1, 50.0).leaves()
    options = LossOptions(label_smoothing=0.2, z_loss_weight=0.1)
    with _ROWS.cut(), twin.serving():
        loss = call(twin, inputs, options=dataclasses.replace(options, reduction=reduction))  # type: ignore[arg-type]
        loss.backward()
    count = 3 if reduction == "mean" else 1
    ones = torch.full((5,), 1 / count, dtype=torch.float64)
    inputs = inputs._replace(options=options)
    truth = truth_of(inputs, OutputGrads(ones))
    assert abs(loss.item() - truth.rows.loss.sum().item() / count) < 1e-5
    for name, leaf in zip(INPUTS, inputs[:3], strict=True):
        error = (leaf.grad.cpu().double() - truth.grads[name].view(leaf.shape)).norm()
        assert error < 2e-6 * truth.sizes[name], name


def _strided(value: Tensor) -> Tensor:
    """The same values, as every second of something."""
    whole = torch.full((*value.shape, 2), 7, dtype=value.dtype, device=value.device)
    whole[..., 0] = value
    return whole[..., 0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("what", ["hidden", "hidden_swapped", "weight", "weight_transposed", "bias", "target", "scale"])
def test_any_strides(twin: Subject, what: str, weighted: bool) -> None:
    case = LinearCase("strides", has_row_scale=True, columns=20, chunk_columns=16)
    plain = case.draw(twin.device)
    if what == "scale":
        options = dataclasses.replace(plain.options, scale=_strided(plain.options.scale))  # type: ignore[arg-type]
        changed = plain._replace(options=options)
    elif what == "hidden_swapped":
        changed = plain._replace(hidden=plain.hidden.transpose(0, 1).contiguous().transpose(0, 1))
    elif what == "weight_transposed":
        changed = plain._replace(weight=plain.weight.t().contiguous().t())
    else:
        changed = plain._replace(**{what: _strided(getattr(plain, what))})
    results = []
    for inputs in (plain, changed):
        # Leaves in the strides given.
        leaves = [each.detach().requires_grad_() for each in inputs[:3] if each is not None]
        inputs = inputs._replace(hidden=leaves[0], weight=leaves[1], bias=leaves[2])
        more = {"token_weights": torch.ones(2, 3, device=twin.device)} if weighted else {}
        with case.cut(), twin.serving():
            loss = call(twin, inputs, options=dataclasses.replace(inputs.options, reduction="sum"), **more)
            results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    # A GEMM may choose by strides.
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


def test_one_row_without_a_dimension(subject: Subject) -> None:
    inputs = _ROWS.draw(subject.device)
    row = inputs._replace(hidden=inputs.hidden[0], target=inputs.target[0], grads=OutputGrads(torch.tensor(2.0)))
    with _ROWS.cut():
        result = run(subject, row)
        weighted = call(
            subject,
            row,
            token_weights=torch.ones((), device=subject.device),
            outputs=OUTPUTS,
            reduction="sum",
            options=None,
        )
    assert result.values["loss"].shape == ()
    assert result.grads["hidden"].shape == (12,)
    check(subject, row, result)
    # Read as a whole there.
    torch.testing.assert_close(weighted.loss, result.values["loss"])
    for name in OUTPUTS:
        torch.testing.assert_close(getattr(weighted, name), result.values[name])


def test_int32_targets_give_the_same_bits(subject: Subject) -> None:
    inputs = _ROWS.draw(subject.device)
    with _ROWS.cut():
        results = [
            run(subject, inputs._replace(target=inputs.target.to(dtype))) for dtype in (torch.int64, torch.int32)
        ]
        weighted = [
            call(
                subject,
                inputs._replace(target=inputs.target.clamp(min=0).to(dtype)),
                # Past int32: equal to none of these targets, also where it is compared with them in 32 bits.
                options=LossOptions(ignore_index=2**32 + 19, reduction="mean", vocab_size=20),
                token_weights=(inputs.target >= 0),
            )
            for dtype in (torch.int64, torch.int32)
        ]
    assert all(torch.equal(results[0].values[name], results[1].values[name]) for name in results[0].values)
    assert all(torch.equal(results[0].grads[name], results[1].grads[name]) for name in INPUTS)
    assert torch.equal(*weighted)
    assert weighted[0].isfinite()


def test_a_declared_shard_that_is_the_whole(subject: Subject) -> None:
    inputs = _ROWS.draw(subject.device)
    with _ROWS.cut():
        declared = run(subject, inputs, shard=VocabShard(0, 20, 20))
        plain = run(subject, inputs)
    assert all(torch.equal(declared.grads[name], plain.grads[name]) for name in INPUTS)
