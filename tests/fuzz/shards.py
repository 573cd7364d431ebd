"""Property: rows cut into shards of any widths give every rank the same right values, and their gradient."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st

from te_ce import LossOptions
from te_ce.outputs import OutputGrads
from tests.fuzz import strategies as draws
from tests.fuzz.judge import Expected
from tests.fuzz.upstream import used
from tests.fuzz.values import Example, batch
from tests.support.bits import same_bits
from tests.support.bounds import check_predictions, check_value
from tests.support.dense import Dense
from tests.support.subject import Subject
from tests.support.whole import Drawn, run_whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharded(Example):
    """Rows over as many ranks as there are widths.

    Attributes:
        part: longest row that a rank reads in one part; None: as ever.
    """

    widths: tuple[int, ...]
    part: int | None


@st.composite
def sharded(draw: Any, float64: bool = False, longest: int = draws.LONGEST) -> Sharded:
    """Any of them; float64 for the twin alone."""
    cut, values = draw(draws.widths(4, longest)), draw(draws.values())
    return Sharded(
        rows=draw(draws.rows(longest)),
        widths=cut,
        dtype=draw(draws.dtypes(float64)),
        values=values,
        options=draw(draws.options(sum(cut), values)),
        outputs=draw(draws.outputs()),
        without_gradient=draw(st.frozensets(st.sampled_from(OutputGrads._fields), max_size=2)),
        part=draw(st.sampled_from((None, None, 32, 300))),
    )


def check(subject: Subject, example: Sharded) -> None:
    """Values of every rank within the bounds, with the same bits; the gradient of all shards within its bound."""
    columns = sum(example.widths)
    drawn = batch(example.values, example.rows, columns, example.dtype, example.options, subject.device)
    grads = used(drawn.grads, example.outputs, example.without_gradient)
    part = contextlib.nullcontext() if example.part is None else subject.reading_in_parts_of(example.part)
    with part:
        results = run_whole(subject, Drawn(*drawn[:3], grads), example.widths, example.outputs)
    expected = Expected(drawn.logits, subject.allowed_ulps(example.dtype))
    truth = expected.add(drawn.target, drawn.options, grads)
    for result in results:
        check_values(result.values, results[0].values, truth, drawn.target, drawn.options)
    expected.check(torch.cat([result.grad for result in results], -1))


def check_values(
    got: dict[str, torch.Tensor],
    first: dict[str, torch.Tensor],
    truth: Dense,
    target: torch.Tensor,
    options: LossOptions,
) -> None:
    """Of one rank, with the bits of the first."""
    for name, value in got.items():
        assert value.shape == target.shape, name
        assert same_bits(value, first[name]), f"{name}: ranks disagree"
        if name == "predictions":
            check_predictions(value, truth, options)
        else:
            check_value(name, value, truth, target, options)
