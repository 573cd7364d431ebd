"""No option gets lost: of every public entry, two values of each give two results, both those of the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, VocabParallelCrossEntropyLoss, vocab_parallel_log_probs
from te_ce.outputs import OUTPUTS, OutputGrads
from te_ce.problem import REPRODUCIBLE_BLOCK, ShardProblem
from tests.support.bounds import check_gradient, check_value
from tests.support.dense import dense
from tests.support.subject import Subject

_ROW_SCALES = [torch.tensor([0.5, 1.0, -2.0, 3.0, 1.5]), torch.tensor([0.5, 1.0, -2.0, 3.0, 2.5])]

# Two values of every option, and what else it takes for them to differ.
_TWO_VALUES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ignore_index": (3, 5, {}),
    "label_smoothing": (0.1, 0.2, {}),
    "smoothing": ("uniform", "others", {"label_smoothing": 0.3}),
    "z_loss_weight": (0.01, 0.02, {}),
    "softcap": (2.0, 3.0, {}),
    "scale": (0.5, -0.7, {}),
    "row_scale": (*_ROW_SCALES, {}),
    "vocab_size": (11, 10, {}),
    "reduction": ("sum", "mean", {}),
}
OF_THE_LOSS = ("label_smoothing", "smoothing", "z_loss_weight", "reduction")
_Entry = Callable[..., Tensor]


def draw(subject: Subject) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(17)
    logits = torch.randn(5, 12, generator=random) * 2
    return logits.to(subject.device), torch.tensor([0, 3, 9, 5, 2], device=subject.device)


def _fields(name: str, value: Any, also: dict[str, Any], subject: Subject) -> dict[str, Any]:
    if name == "row_scale":
        name, value = "scale", value.to(subject.device)
    return {name: value, **also}


def _by_keywords(subject: Subject, logits: Tensor, target: Tensor, **fields: Any) -> Tensor:
    return subject.loss(logits, target, **fields)  # type: ignore[no-any-return]


def _by_options(subject: Subject, logits: Tensor, target: Tensor, **fields: Any) -> Tensor:
    return subject.loss(logits, target, options=LossOptions(**fields))  # type: ignore[no-any-return]


def _with_outputs(subject: Subject, logits: Tensor, target: Tensor, **fields: Any) -> Tensor:
    return subject.loss(logits, target, outputs=OUTPUTS, **fields).loss  # type: ignore[no-any-return]


def _module(subject: Subject, logits: Tensor, target: Tensor, **fields: Any) -> Tensor:
    scale = fields.pop("scale") if isinstance(fields.get("scale"), Tensor) else None
    with subject.serving():
        return VocabParallelCrossEntropyLoss(**fields)(logits, target, scale)  # type: ignore[no-any-return]


def _module_by_options(subject: Subject, logits: Tensor, target: Tensor, **fields: Any) -> Tensor:
    scale = fields.pop("scale") if isinstance(fields.get("scale"), Tensor) else None
    with subject.serving():
        return VocabParallelCrossEntropyLoss(options=LossOptions(**fields))(logits, target, scale=scale)  # type: ignore[no-any-return]


LOSSES: dict[str, _Entry] = {
    "keywords": _by_keywords,
    "options": _by_options,
    "outputs": _with_outputs,
    "module": _module,
    "module_options": _module_by_options,
}


@pytest.mark.parametrize("entry", LOSSES)
@pytest.mark.parametrize("name", _TWO_VALUES)
def test_two_values_give_two_losses(subject: Subject, name: str, entry: str) -> None:
    first, second, also = _TWO_VALUES[name]
    logits, target = draw(subject)
    results = []
    # The first once more: what was resolved for the second must not serve it.
    for value in (first, second, first):
        fields = _fields(name, value, also, subject)
        options = LossOptions(**fields)
        leaf = logits.clone().requires_grad_()
        loss = LOSSES[entry](subject, leaf, target, **fields)
        counted = {"none": 1, "sum": 1, "mean": 5}[options.reduction]
        truth = dense(logits, target, options, torch.ones(5) / counted)
        if options.reduction == "none":
            check_value("loss", loss, truth, target, options)
        else:
            assert abs(loss.item() - truth.loss.sum().item() / counted) < 4e-6
        loss.sum().backward()
        assert leaf.grad is not None
        g = torch.ones(5) / counted
        check_gradient(leaf.grad, truth, logits, target, options, g, subject.allowed_ulps(logits.dtype))
        results.append((loss.detach(), leaf.grad))
    for old, new, again in zip(*results, strict=True):
        assert not torch.equal(old, new)
        assert torch.equal(old, again)


@pytest.mark.parametrize("name", [name for name in _TWO_VALUES if name not in OF_THE_LOSS])
def test_two_values_give_two_log_probs_and_entropies(subject: Subject, name: str) -> None:
    first, second, also = _TWO_VALUES[name]
    logits, target = draw(subject)
    results = []
    for value in (first, second, first):
        fields = _fields(name, value, also, subject)
        options = LossOptions(**fields)
        leaf = logits.clone().requires_grad_()
        with subject.serving():
            log_probs, entropy = vocab_parallel_log_probs(leaf, target, entropy=True, **fields)
            alone = vocab_parallel_log_probs(leaf, target, options=options)
        assert torch.equal(log_probs, alone)
        grads = OutputGrads(None, log_probs=torch.ones(5), entropy=torch.full((5,), -0.3))
        truth = dense(logits, target, options, grads)
        check_value("log_probs", log_probs, truth, target, options)
        check_value("entropy", entropy, truth, target, options)
        (log_probs.sum() - 0.3 * entropy.sum()).backward()
        check_gradient(leaf.grad, truth, logits, target, options, grads, 0.5)
        results.append((log_probs.detach(), entropy.detach(), leaf.grad))
    for old, new, again in zip(*results, strict=True):
        assert not torch.equal(old, new)
        assert torch.equal(old, again)


@pytest.mark.parametrize("entry", LOSSES)
def test_checked_targets_raise(subject: Subject, entry: str) -> None:
    logits, target = draw(subject)
    target[1] = 12
    with pytest.raises(IndexError, match="row 1 with target 12"):
        LOSSES[entry](subject, logits, target, check_targets=True)
    assert LOSSES[entry](subject, logits, target, check_targets=False).isnan().sum() == 1


@pytest.mark.parametrize("entry", LOSSES)
@pytest.mark.parametrize("wanted", [False, True])
def test_reproducible_tp_makes_blocks(subject: Subject, entry: str, wanted: bool) -> None:
    seen: list[ShardProblem] = []

    def row_loss(logits: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None) -> Any:
        seen.append(problem)
        return subject.backend.row_loss(logits, target, problem, row_scale)

    recording = dataclasses.replace(subject, backend=subject.backend._replace(row_loss=row_loss))
    LOSSES[entry](recording, *draw(subject), reproducible_tp=wanted)
    assert [problem.block for problem in seen] == [REPRODUCIBLE_BLOCK if wanted else 0]


@pytest.mark.parametrize(
    "name", ["temperature", "logit_softcapping", "ignored_index", "lse_square_scale", "output", "dim"]
)
def test_unknown_keywords_raise(subject: Subject, name: str) -> None:
    logits, target = draw(subject)
    for entry in (
        *LOSSES.values(),
        lambda subject, *arguments, **fields: vocab_parallel_log_probs(*arguments, **fields),
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword.*{name}"):
            entry(subject, logits, target, **{name: 1.0})


def test_options_and_fields_are_not_mixed(subject: Subject) -> None:
    logits, target = draw(subject)
    for call in (subject.loss, vocab_parallel_log_probs):
        with pytest.raises(TypeError, match="options and 'scale' were both given"):
            call(logits, target, options=LossOptions(), scale=2.0)
    with pytest.raises(TypeError, match="options and 'softcap' were both given"):
        VocabParallelCrossEntropyLoss(options=LossOptions(), softcap=2.0)


_OFF: list[dict[str, Any]] = [
    {"label_smoothing": 0.0},
    {"label_smoothing": 0.0, "smoothing": "others"},
    {"z_loss_weight": 0.0},
    {"z_loss_weight": 0},
    {"softcap": None},
    {"scale": 1.0},
    {"scale": 1},
    {"vocab_size": None},
    {"vocab_size": 12},
    {"check_targets": True},
]


@pytest.mark.parametrize("off", _OFF, ids=str)
def test_an_option_that_is_off_changes_no_bit(subject: Subject, off: dict[str, Any]) -> None:
    logits, target = draw(subject)
    results = []
    for fields in ({}, off):
        leaf = logits.clone().requires_grad_()
        got = subject.loss(leaf, target, outputs=OUTPUTS, **fields)
        plain = subject.loss(logits, target, **fields)
        assert torch.equal(plain, got.loss)
        (got.loss.sum() + got.entropy.sum()).backward()
        results.append((*got, leaf.grad))
    assert all(torch.equal(old, new) for old, new in zip(*results, strict=True))


def test_a_scale_of_1_in_every_row_is_no_scale(subject: Subject) -> None:
    """To a rounding: what multiplies by a number that is read has other instructions than what does not multiply."""
    logits, target = draw(subject)
    results = []
    for fields in ({}, {"scale": torch.ones(target.shape, device=subject.device)}):
        leaf = logits.clone().requires_grad_()
        got = subject.loss(leaf, target, outputs=OUTPUTS, **fields)
        (got.loss.sum() + got.entropy.sum()).backward()
        results.append((*got, leaf.grad))
    for plain, scaled in zip(*results, strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-7)
