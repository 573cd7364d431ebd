"""What a call returns besides the loss: names, shapes, rows that are ignored or wrong, what can be differentiated."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, LossOutput, VocabShard
from te_ce.outputs import OUTPUTS
from te_ce.problem import ShardProblem
from tests.support.bounds import check_predictions, check_value
from tests.support.dense import dense
from tests.support.subject import Subject

_DIFFERENTIABLE = ("log_probs", "entropy", "lse")
_WHOLE = LossOptions(z_loss_weight=0.1, label_smoothing=0.1, softcap=3.0, scale=2.0)


def _inputs(subject: Subject, shape: tuple[int, ...] = (2, 3), columns: int = 12) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(9)
    logits = torch.randn(*shape, columns, generator=random) * 2
    return logits.to(subject.device), torch.randint(columns, shape, generator=random).to(subject.device)


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    return (first is None and second is None) or torch.equal(first, second)  # type: ignore[arg-type]


def test_no_names_give_the_plain_tensor(subject: Subject) -> None:
    logits, target = _inputs(subject)
    plain = subject.loss(logits, target)
    for empty in ((), [], set(), {}, iter(())):
        loss = subject.loss(logits, target, outputs=empty)
        assert type(loss) is Tensor
        assert torch.equal(loss, plain)


@pytest.mark.parametrize(
    "make",
    [list, tuple, set, frozenset, iter, dict.fromkeys, lambda names: (name for name in names), lambda names: names * 2],
    ids=["list", "tuple", "set", "frozenset", "iterator", "dict", "generator", "repeated"],
)
def test_names_in_any_collection(subject: Subject, make: Any) -> None:
    logits, target = _inputs(subject)
    names = ["predictions", "log_probs", "lse"]
    got = subject.loss(logits, target, outputs=make(names))
    assert type(got) is LossOutput
    assert [name for name in got._fields if getattr(got, name) is not None] == [
        "loss",
        "log_probs",
        "lse",
        "predictions",
    ]


def test_names_in_any_order(subject: Subject) -> None:
    logits, target = _inputs(subject, (3,))
    first = subject.loss(logits, target, outputs=OUTPUTS)
    for names in itertools.islice(itertools.permutations(OUTPUTS), 0, None, 24):
        assert all(_same(a, b) for a, b in zip(first, subject.loss(logits, target, outputs=names), strict=True))


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        (
            "entropy",
            TypeError,
            r'outputs: expected a collection of names.*got \'entropy\'; write outputs=\("entropy",\)',
        ),
        (3, TypeError, "outputs: expected a collection of names among log_probs, entropy, lse, z_loss, predictions"),
        (None, TypeError, "outputs: .*got None"),
        (("entropy", 3), TypeError, "outputs: .*got 3 among them"),
        (("entropies",), ValueError, "outputs: .*got 'entropies' among them"),
        (["loss"], ValueError, "outputs: .*got 'loss' among them"),
    ],
)
def test_wrong_names_are_refused(subject: Subject, outputs: object, error: type[Exception], message: str) -> None:
    logits, target = _inputs(subject)
    with pytest.raises(error, match=message):
        subject.loss(logits, target, outputs=outputs)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shapes_and_dtypes(subject: Subject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits, target = _inputs(subject, shape)
    got = subject.loss(logits.to(dtype).requires_grad_(), target.int(), outputs=OUTPUTS, options=_WHOLE)
    for name, value in got._asdict().items():
        assert value.shape == shape, name
        assert value.is_contiguous(), name
        assert value.dtype == (torch.int64 if name == "predictions" else torch.float32), name
        assert value.device == logits.device, name


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_reduction_touches_the_loss_only(subject: Subject, reduction: str) -> None:
    logits, target = _inputs(subject)
    target[0, 1] = -100
    rows = subject.loss(logits, target, outputs=OUTPUTS, z_loss_weight=0.1)
    reduced = subject.loss(logits, target, outputs=OUTPUTS, z_loss_weight=0.1, reduction=reduction)
    assert all(torch.equal(a, b) for a, b in zip(rows[1:], reduced[1:], strict=True))
    expected = rows.loss.sum() / (5 if reduction == "mean" else 1)
    torch.testing.assert_close(reduced.loss, expected, rtol=1e-6, atol=0)


def test_the_loss_is_the_same_with_outputs(subject: Subject) -> None:
    logits, target = _inputs(subject)
    for options in (LossOptions(), _WHOLE):
        plain = subject.loss(logits, target, options=options)
        for name in OUTPUTS:
            assert torch.equal(plain, subject.loss(logits, target, options=options, outputs=(name,)).loss), name


@pytest.mark.parametrize("name", _DIFFERENTIABLE)
def test_ignored_rows_are_zero(subject: Subject, name: str) -> None:
    logits, target = _inputs(subject, (5,))
    target[[1, 3, 4]] = -100
    logits[3] = torch.nan
    logits[4] = torch.inf
    leaf = logits.clone().requires_grad_()
    got = subject.loss(leaf, target, outputs=OUTPUTS, options=_WHOLE)
    for value in (got.loss, got.log_probs, got.entropy, got.lse, got.z_loss):
        assert (value[[1, 3, 4]] == 0).all()
        assert (value[[0, 2]] != 0).all()
    assert got.predictions[1] == logits[1].argmax()
    (getattr(got, name).sum() + got.loss.sum()).backward()
    assert (leaf.grad[[1, 3, 4]] == 0).all()
    assert (leaf.grad[[0, 2]] != 0).any(-1).all()


@pytest.mark.parametrize("target", [12, 100, -1, -(2**40)])
@pytest.mark.parametrize("used", ["loss", *_DIFFERENTIABLE])
def test_a_target_that_is_no_class_is_nan(subject: Subject, target: int, used: str) -> None:
    logits, targets = _inputs(subject, (3,))
    good = subject.loss(logits, targets, outputs=OUTPUTS, options=_WHOLE)
    targets[1] = target
    leaf = logits.clone().requires_grad_()
    got = subject.loss(leaf, targets, outputs=OUTPUTS, options=_WHOLE)
    for name in ("loss", *_DIFFERENTIABLE, "z_loss"):
        value = getattr(got, name)
        assert value.isnan().tolist() == [False, True, False], name
        assert torch.equal(value[[0, 2]], getattr(good, name)[[0, 2]]), name
    assert torch.equal(got.predictions, good.predictions)
    getattr(got, used).sum().backward()
    assert leaf.grad.isnan().all(-1).tolist() == [False, True, False]
    assert leaf.grad[[0, 2]].isfinite().all()


def test_what_can_be_differentiated(subject: Subject) -> None:
    logits, target = _inputs(subject)
    got = subject.loss(logits.requires_grad_(), target, outputs=OUTPUTS)
    assert [name for name, value in got._asdict().items() if value.requires_grad] == ["loss", *_DIFFERENTIABLE]
    got = subject.loss(logits.detach(), target, outputs=OUTPUTS)
    assert not any(value.requires_grad for value in got)
    with torch.no_grad():
        assert not any(value.requires_grad for value in subject.loss(logits, target, outputs=OUTPUTS))


def test_predictions_are_the_smaller_of_equals(subject: Subject) -> None:
    rows = torch.tensor([[3.0, 7.0, 7.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -3.0, 5.0, 5.0], [-math.inf] * 3 + [-9.0]])
    logits, target = rows.to(subject.device), torch.tensor([0, 1, -100, 3], device=subject.device)
    assert subject.loss(logits, target, outputs=["predictions"]).predictions.tolist() == [1, 0, 2, 3]
    # A negative scale turns the order round; padding is nobody's prediction.
    negative = subject.loss(logits, target, outputs=["predictions"], scale=-1.0).predictions.tolist()
    assert negative[:3] == [3, 0, 1]
    padded = subject.loss(logits, target, outputs=["predictions"], vocab_size=2).predictions.tolist()
    assert padded[:3] == [1, 0, 0]


def test_z_loss_is_its_part_of_the_loss(subject: Subject) -> None:
    logits, target = _inputs(subject)
    logits = logits + 5
    without = subject.loss(logits, target)
    got = subject.loss(logits, target, z_loss_weight=0.1, outputs=["z_loss", "lse"])
    torch.testing.assert_close(got.z_loss, 0.1 * got.lse**2, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.loss - got.z_loss, without, rtol=0, atol=4e-6)
    assert (subject.loss(logits, target, outputs=["z_loss"]).z_loss == 0).all()


def test_rows_of_any_strides(subject: Subject) -> None:
    whole, target = _inputs(subject, (3, 2))
    logits, target = whole.transpose(0, 1), target.t()
    got = subject.loss(logits, target, outputs=OUTPUTS)
    truth = dense(logits, target, LossOptions(), torch.ones(2, 3))
    for name in ("loss", *_DIFFERENTIABLE):
        check_value(name, getattr(got, name), truth, target, LossOptions())
    check_predictions(got.predictions, truth, LossOptions())


@pytest.mark.parametrize(
    ("outputs", "options", "floats"),
    [
        ((), LossOptions(), 3),
        (("log_probs", "lse", "z_loss"), LossOptions(z_loss_weight=0.1, scale=0.5, softcap=2.0), 3),
        (("entropy",), LossOptions(), 4),
        (("predictions",), LossOptions(), 4),
        ((), LossOptions(label_smoothing=0.1), 5),
        (OUTPUTS, LossOptions(label_smoothing=0.1), 7),
    ],
)
def test_what_ranks_exchange(subject: Subject, outputs: tuple[str, ...], options: LossOptions, floats: int) -> None:
    """An output costs the collective what it needs and no more."""
    logits, target = _inputs(subject)
    problem = ShardProblem.resolve(options, VocabShard(0, 12, 24), 2, outputs)
    stats = subject.backend.row_statistics(logits, target, problem)
    assert stats.shape == (1, floats, 6)
    assert stats.dtype == torch.float32
