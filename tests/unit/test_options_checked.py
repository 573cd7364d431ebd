"""Options and call forms: compared by value, refused by name, and the signatures that callers rely on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import te_ce
from te_ce import LossOptions, LossOutput, VocabShard, vocab_parallel_log_probs
from tests.support.subject import Subject
from tests.unit.test_options import LOSSES, OF_THE_LOSS, draw


def test_options_are_equal_by_value_and_by_the_same_tensor() -> None:
    fields = {"scale": 2.0, "softcap": 3.0, "z_loss_weight": 0.1, "vocab_size": 7}
    assert LossOptions(**fields) == LossOptions(**fields)  # type: ignore[arg-type]
    assert hash(LossOptions(**fields)) == hash(LossOptions(**fields))  # type: ignore[arg-type]
    assert LossOptions(scale=2) == LossOptions(scale=2.0)
    for name, value in fields.items():
        assert LossOptions(**{name: value}) != LossOptions()  # type: ignore[arg-type]
    scale = torch.ones(3)
    of_rows = LossOptions(scale=scale)
    assert of_rows == LossOptions(scale=scale)
    assert hash(of_rows) == hash(LossOptions(scale=scale))
    for other in (
        LossOptions(scale=scale.clone()),
        LossOptions(),
        LossOptions(scale=1.0),
        LossOptions(scale=scale, softcap=1),
    ):
        assert of_rows != other
        assert other != of_rows
    assert of_rows != "options"
    assert len({of_rows, LossOptions(scale=scale), LossOptions()}) == 2


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"z_loss_weight": -0.1}, ValueError, "z_loss_weight: expected a finite number >= 0, got -0.1"),
        ({"z_loss_weight": float("inf")}, ValueError, "z_loss_weight: expected a finite number"),
        ({"z_loss_weight": float("nan")}, ValueError, "z_loss_weight: .*got nan"),
        ({"z_loss_weight": True}, TypeError, "z_loss_weight: expected a number, got bool"),
        ({"z_loss_weight": "0.1"}, TypeError, "z_loss_weight: expected a number, got str"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a finite number > 0 or None, got 0.0"),
        ({"softcap": -30.0}, ValueError, "softcap: .*got -30.0"),
        ({"softcap": float("inf")}, ValueError, "softcap: .*got inf"),
        ({"softcap": float("nan")}, ValueError, "softcap: .*got nan"),
        ({"softcap": 1e-46}, ValueError, "softcap: "),
        ({"softcap": False}, TypeError, "softcap: expected a number, got bool"),
        ({"scale": 0.0}, ValueError, "scale: expected a finite number other than 0, got 0.0"),
        ({"scale": 1e-46}, ValueError, "scale: "),
        ({"scale": 1e39}, ValueError, "scale: "),
        ({"scale": float("-inf")}, ValueError, "scale: .*got -inf"),
        ({"scale": None}, TypeError, "scale: expected a number, got NoneType"),
        ({"scale": [1.0]}, TypeError, "scale: expected a number, got list"),
        ({"scale": torch.ones(5, dtype=torch.float64)}, TypeError, "scale: .*float32 tensor, got a tensor of float64"),
        ({"scale": torch.ones(5, dtype=torch.int64)}, TypeError, "scale: .*got a tensor of int64"),
        ({"scale": torch.ones(5, requires_grad=True)}, ValueError, "scale: .*without requires_grad"),
        ({"scale": torch.ones(4)}, ValueError, r"scale: expected shape \(5,\).*got \(4,\)"),
        ({"scale": torch.ones(5, 1)}, ValueError, r"scale: expected shape \(5,\).*got \(5, 1\)"),
        ({"scale": torch.ones(())}, ValueError, r"scale: expected shape \(5,\)"),
        ({"reproducible_tp": 1}, TypeError, "reproducible_tp: expected a bool, got int"),
    ],
)
def test_wrong_values_are_refused(
    subject: Subject, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    logits, target = draw(subject)
    fields = {name: value.to(subject.device) if isinstance(value, Tensor) else value for name, value in fields.items()}
    for entry in ("keywords", "options", "outputs"):
        with pytest.raises(error, match=message):
            LOSSES[entry](subject, logits, target, **fields)


@pytest.mark.parametrize("name", OF_THE_LOSS)
def test_log_probs_refuse_options_that_change_nothing(subject: Subject, name: str) -> None:
    logits, target = draw(subject)
    value = {"label_smoothing": 0.1, "smoothing": "others", "z_loss_weight": 0.1, "reduction": "mean"}[name]
    for keywords in ({name: value}, {"options": LossOptions(**{name: value})}):
        with pytest.raises(ValueError, match=f"{name}: expected .*, as it changes no log-prob"):
            vocab_parallel_log_probs(logits, target, **keywords)


_SIGNATURES = {
    te_ce.vocab_parallel_cross_entropy: "logits, target, *, group=None, options=None, shard=None, outputs=(), "
    "inplace='auto', **loss_options",
    te_ce.vocab_parallel_log_probs: "logits, target, *, group=None, options=None, shard=None, inplace='auto', "
    "entropy=False, **loss_options",
    te_ce.VocabParallelCrossEntropyLoss: "*, group=None, options=None, shard=None, outputs=(), inplace='auto', "
    "**loss_options",
    te_ce.VocabParallelCrossEntropyLoss.forward: "self, logits, target, scale=None",
    te_ce.LossOptions: "*, ignore_index=-100, label_smoothing=0.0, smoothing='uniform', z_loss_weight=0.0, "
    "softcap=None, scale=1.0, vocab_size=None, reduction='none', check_targets=False, reproducible_tp=False",
    te_ce.LossOutput: "loss, log_probs=None, entropy=None, lse=None, z_loss=None, predictions=None",
    te_ce.VocabShard: "start, stop, size",
    te_ce.VocabShard.even: "size, group=None",
}


@pytest.mark.parametrize("function", _SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures(function: Callable[..., object]) -> None:
    signature = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    shown = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    assert shown == f"({_SIGNATURES[function]})"


def test_calls_of_every_form(subject: Subject) -> None:
    logits, target = draw(subject)
    expected = subject.loss(logits, target)
    shard = VocabShard(0, 12, 12)
    for keywords in ({}, {"shard": shard}, {"group": None, "options": None, "outputs": (), "inplace": False}):
        assert torch.equal(subject.loss(logits=logits, target=target, **keywords), expected)
    with pytest.raises(TypeError, match="positional"), subject.serving():
        te_ce.vocab_parallel_cross_entropy(logits, target, None)  # type: ignore[call-overload]
    assert LossOutput(expected)[0] is expected
