"""What hypothesis has found, as small as it could make it, by what it showed; each stays right."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from te_ce import LossOptions
from tests.fuzz import calls, linear, shards
from tests.fuzz.calls import Call
from tests.fuzz.linear import Layer
from tests.fuzz.shards import Sharded
from tests.fuzz.values import Values
from tests.support.subject import Subject

_PLAIN = Sharded(
    rows=(3,),
    widths=(2,),
    dtype=torch.float32,
    values=Values(),
    options=LossOptions(),
    outputs=(),
    without_gradient=frozenset(),
    part=None,
)
_CALL = Call(
    rows=(7,),
    columns=2,
    dtype=torch.float32,
    values=Values(target="classes"),
    options=LossOptions(),
    outputs=(),
    without_gradient=frozenset(),
    layout="dense",
    target_layout="dense",
    target_dtype=torch.int64,
    upstream_layout="dense",
    graph="alone",
    inplace="auto",
)
_LAYER = Layer(
    rows=(),
    hidden_size=2,
    columns=11,
    dtype=torch.float16,
    values=Values(target="classes"),
    options=LossOptions(),
    outputs=(),
    without_gradient=frozenset(),
    has_bias=True,
    chunk_columns=1,
    chunk_tokens=1,
    keep="recompute",
    weighted=False,
    frozen=frozenset(),
)
_with = dataclasses.replace

SHARDS = {
    # A reference by logsumexp loses log n here, in float64.
    "equal logits of 1e30": _with(_PLAIN, values=Values(1, "extreme", "classes", has_row_scale=True)),
    "equal logits of 1e30, the derivative of lse": _with(
        _PLAIN, rows=(), widths=(3,), values=Values(1, "extreme", "classes"), outputs=("lse",)
    ),
    "a target of -inf, smoothed to the others": _with(
        _PLAIN,
        rows=(),
        values=Values(1, "masked", "classes"),
        options=LossOptions(label_smoothing=0.1, smoothing="others"),
    ),
    # Probabilities that float32 does not have, times 1e30.
    "no probability, a huge gradient": _with(
        _PLAIN, rows=(), widths=(12,), values=Values(0, upstream="huge"), options=LossOptions(scale=50.0)
    ),
    # Of 1 - p, float64 has no more digits than float32.
    "a confident row's entropy": _with(
        _PLAIN,
        rows=(),
        widths=(16,),
        values=Values(207351, target="classes"),
        options=LossOptions(scale=50.0),
        outputs=("entropy",),
        without_gradient=frozenset({"loss"}),
    ),
    "one class, a gradient beyond float16": _with(
        _PLAIN,
        rows=(),
        widths=(1,),
        dtype=torch.float16,
        values=Values(0, "extreme", "classes", "huge", has_row_scale=True),
        options=LossOptions(label_smoothing=0.1),
    ),
}
CALLS = {
    # Its term has the other sign, and little is left.
    "a target less likely than the others": _with(
        _CALL, options=LossOptions(label_smoothing=0.9, smoothing="others"), values=Values(target="classes")
    ),
    "strided columns of no rows, in place": _with(_CALL, rows=(0,), layout="strided columns", inplace=True),
    "two gradients beyond float16, of either sign": _with(
        _CALL,
        rows=(),
        columns=4,
        dtype=torch.float16,
        values=Values(0, target="classes", upstream="huge", has_row_scale=True),
        graph="another loss",
    ),
}
LAYERS = {
    "a class that has it all": _with(
        _LAYER, dtype=torch.float32, columns=1, hidden_size=1, options=LossOptions(label_smoothing=0.9)
    ),
    "a gradient of float16's smallest numbers": _with(
        _LAYER,
        values=Values(103415, target="classes", has_row_scale=True),
        options=LossOptions(z_loss_weight=1e-4, vocab_size=1),
    ),
    "a gradient beyond float16": _with(
        _LAYER,
        hidden_size=19,
        columns=4,
        options=LossOptions(z_loss_weight=2.0, scale=50.0, reduction="sum"),
        weighted=True,
    ),
}


@pytest.mark.parametrize("example", SHARDS.values(), ids=SHARDS)
def test_shards(subject: Subject, example: Sharded) -> None:
    shards.check(subject, example)


@pytest.mark.parametrize("example", CALLS.values(), ids=CALLS)
def test_calls(subject: Subject, example: Call) -> None:
    calls.check(subject, example)


@pytest.mark.parametrize("example", LAYERS.values(), ids=LAYERS)
def test_layers(subject: Subject, example: Layer) -> None:
    linear.check(subject, example)
