"""Transformer Engine's interface: its signature, and what each argument does, against float64."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_ce import LossOptions
from te_ce.transformer_engine import parallel_cross_entropy
from tests.support.bounds import check_gradient, check_loss
from tests.support.broken import BROKEN
from tests.support.subject import Subject
from tests.support.transformer_engine import B, S, V, call, draw, truth_of


def _check_against_float64(subject: Subject, dtype: torch.dtype, alpha: float, reduce: bool, overwrite: bool) -> None:
    logits, target, g = draw(subject, dtype)
    g = g[:1, 0] if reduce else g
    x = logits.clone().requires_grad_()
    loss = call(subject, x * 1, target, alpha, reduce, overwrite_input=overwrite)
    (grad,) = torch.autograd.grad(loss, x, g)
    truth = truth_of(logits, target, g, alpha)
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    kept = target.reshape(-1) != -100
    if reduce:
        assert loss.shape == (1,)
        truth = truth._replace(loss=truth.loss.sum().view(1) / kept.sum().cpu())
        g = (g / kept.sum()).expand(B, S)
    else:
        assert loss.shape == (B, S)
    check_loss(loss, truth)
    g = torch.where(kept.view(B, S), g, 0.0)
    options = LossOptions(label_smoothing=min(alpha, 1 - 1e-9))
    check_gradient(grad, truth, logits.cpu(), target.cpu(), options, g.cpu(), subject.allowed_ulps(dtype))


@pytest.mark.parametrize(
    ("dtype", "alpha", "reduce", "overwrite"),
    [
        (torch.float32, 0, False, False),
        (torch.bfloat16, 0, False, False),
        (torch.float32, 0.1, False, False),
        (torch.float32, 1.0, False, False),
        (torch.float32, 0, True, False),
        (torch.float32, 0, False, True),
        (torch.bfloat16, 1.0, False, True),
        (torch.bfloat16, 0.1, True, True),
    ],
)
def test_float64(subject: Subject, dtype: torch.dtype, alpha: float, reduce: bool, overwrite: bool) -> None:
    _check_against_float64(subject, dtype, alpha, reduce, overwrite)


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("broken", ["off_target_zeroed", "doubled_reduction", "target_shifted"])
def test_a_broken_loss_is_refused(subject: Subject, broken: str, alpha: float) -> None:
    wrong = dataclasses.replace(subject, backend=BROKEN[broken](subject.backend))
    with pytest.raises(AssertionError, match="outside the bound"):
        _check_against_float64(wrong, torch.float32, alpha, False, False)


def test_signature() -> None:
    """Names, order, kinds and defaults of the release named."""
    parameters = inspect.signature(parallel_cross_entropy).parameters.values()
    either, by_name, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect._empty
    assert [(p.name, p.kind, p.default) for p in parameters] == [
        ("inp", either, none),
        ("target", either, none),
        ("label_smoothing", either, 0.0),
        ("reduce_loss", either, False),
        ("dist_process_group", either, None),
        ("ignore_idx", either, -100),
        ("is_cg_capturable", either, False),
        ("overwrite_input", by_name, False),
        ("_input", by_name, None),
    ]
    with pytest.raises(TypeError, match="unexpected keyword"):
        parallel_cross_entropy(torch.ones(1, 1, 2), torch.zeros(1, 1).long(), ignore_index=3)  # type: ignore[call-arg]


def test_positional_and_keyword_are_the_same(subject: Subject) -> None:
    logits, target, _ = draw(subject)
    target[0, 1] = 3
    by_position = call(subject, logits, target, 0.1, True, None, 3, False)
    by_name = call(
        subject,
        inp=logits,
        target=target,
        label_smoothing=0.1,
        reduce_loss=True,
        dist_process_group=None,
        ignore_idx=3,
        is_cg_capturable=False,
    )
    assert torch.equal(by_position, by_name)


def test_ignore_idx(subject: Subject) -> None:
    """A class like any other may be the one to ignore; the default one then is no class."""
    logits, target, g = draw(subject)
    target[0, 1] = 7
    target[1, 2] = 7
    x = logits.clone().requires_grad_()
    loss = call(subject, x, target, 0.1, ignore_idx=7)
    (grad,) = torch.autograd.grad(loss, x, g)
    truth = truth_of(logits, target, g, 0.1, 7)
    assert loss[0, 1] == loss[1, 2] == 0
    assert (grad[0, 1] == 0).all()
    torch.testing.assert_close(loss.double().cpu().view(-1), truth.loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(grad.double().cpu().view(-1, V), truth.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("reduce", [False, True])
def test_nothing_but_ignored_rows(subject: Subject, reduce: bool) -> None:
    logits, target, _ = draw(subject)
    logits[0, 0] = torch.nan
    x = logits.requires_grad_()
    loss = call(subject, x, target.fill_(-100), 0.1, reduce)
    assert (loss == 0).all()
    loss.sum().backward()
    assert (x.grad == 0).all()


@pytest.mark.parametrize("target", [-1, V, 2**40])
def test_target_that_is_no_class(subject: Subject, target: int) -> None:
    logits, targets, _ = draw(subject)
    targets[1, 3] = target
    x = logits.requires_grad_()
    loss = call(subject, x, targets)
    loss.sum().backward()
    assert loss.isnan().nonzero().tolist() == [[1, 3]]
    assert x.grad[1, 3].isnan().all()
    assert x.grad.isnan().sum() == V


def _layouts(logits: Tensor) -> dict[str, Tensor]:
    wide = torch.stack([logits, logits], -1).flatten(-2)
    return {
        "transposed": logits.transpose(0, 1).contiguous().transpose(0, 1),
        "every second column": wide[..., ::2],
        "rows apart": F.pad(logits, (0, 3))[..., :V],
    }


@pytest.mark.parametrize("layout", ["transposed", "every second column", "rows apart"])
def test_layouts_of_inp(subject: Subject, layout: str) -> None:
    logits, target, g = draw(subject)
    x = _layouts(logits)[layout].detach().requires_grad_()
    assert not x.is_contiguous()
    loss = call(subject, x, target)
    (grad,) = torch.autograd.grad(loss, x, g)
    truth = truth_of(logits, target, g)
    check_loss(loss, truth)
    torch.testing.assert_close(grad.double().cpu().reshape(-1, V), truth.grad, rtol=0, atol=1e-6)


def test_layouts_of_target(subject: Subject) -> None:
    """Flat, a column, and the odd strides that a transpose leaves."""
    logits, target, _ = draw(subject)
    expected = call(subject, logits, target)
    for other in (target.flatten(), target.view(-1, 1), target.t().contiguous().t()):
        assert torch.equal(call(subject, logits, other), expected)
    swapped = call(subject, logits.transpose(0, 1), target.t())
    assert torch.equal(swapped, expected.t())


def test_deprecated_arguments(subject: Subject) -> None:
    logits, target, _ = draw(subject)
    expected = call(subject, logits, target)
    with pytest.warns(FutureWarning, match="_input is deprecated: pass the logits as inp") as seen:
        assert torch.equal(call(subject, torch.zeros_like(logits), target, _input=logits), expected)
    assert seen[0].filename == call.__code__.co_filename
    with pytest.warns(FutureWarning, match="is_cg_capturable is deprecated"):
        assert torch.equal(call(subject, logits, target, 0.0, False, None, -100, True), expected)


_X, _Y = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        (([1.0], _Y), {}, TypeError, "inp: expected a torch.Tensor, got list"),
        ((_X, None), {}, TypeError, "target: expected a torch.Tensor, got NoneType"),
        ((_X[0], _Y[0]), {}, ValueError, r"inp: expected a 3D tensor .*, got shape \(3, 5\)"),
        ((_X[:0], _Y[:0]), {}, ValueError, r"inp: expected no dimension of size 0, got shape \(0, 3, 5\)"),
        ((_X[..., :0], _Y), {}, ValueError, "inp: expected no dimension of size 0"),
        ((_X.half(), _Y), {}, TypeError, "inp: expected BF16 or FP32 logits, got torch.float16"),
        ((_X, _Y.int()), {}, TypeError, "target: expected torch.int64 ids, got torch.int32"),
        ((_X, _Y.to("meta")), {}, ValueError, "target: expected device cpu, that of inp, got meta"),
        ((_X, _Y[:, :2]), {}, ValueError, "target: expected one target id for each of the 6 rows of inp, got 4"),
        ((_X, _Y.t()), {}, ValueError, r"target: expected shape \(2, 3\), the leading one of inp, got \(3, 2\)"),
        ((_X, _Y, 1.1), {}, ValueError, r"label_smoothing: expected a number in \[0, 1\], got 1.1"),
        ((_X, _Y, -0.1), {}, ValueError, r"label_smoothing: expected a number in \[0, 1\], got -0.1"),
        ((_X, _Y, float("nan")), {}, ValueError, "label_smoothing: expected a number in"),
        ((_X.mT, _Y.new_zeros(2, 5)), {"overwrite_input": True}, ValueError, "overwrite_input: expected a contiguous"),
        ((_X, _Y), {"ignore_idx": 0.5}, TypeError, "ignore_index: expected an int"),
        ((_X, _Y), {"dist_process_group": "tp"}, TypeError, "dist_process_group: expected .* got str"),
    ],
)
def test_errors(
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setenv("TE_CE_BACKEND", "torch")
    with pytest.raises(error, match=message):
        parallel_cross_entropy(*arguments, **keywords)


def test_cpu_logits_are_refused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("TE_CE_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="inp: expected a CUDA tensor, got cpu"):
        parallel_cross_entropy(_X, _Y)
    monkeypatch.setenv("TE_CE_BACKEND", "torch")
    assert parallel_cross_entropy(_X, _Y).shape == (2, 3)


def test_one_class(subject: Subject) -> None:
    x = torch.randn(2, 3, 1, device=subject.device).requires_grad_()
    for alpha in (0.0, 0.3, 1.0):
        loss = call(subject, x, torch.zeros(2, 3, dtype=torch.int64, device=subject.device), alpha)
        assert (loss == 0).all()
