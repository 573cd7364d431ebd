"""The properties of one process, a run of one, and a run of several for a given time."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz import calls, linear, shards
from tests.fuzz.strategies import LONGEST
from tests.fuzz.tally import Tally
from tests.support.subject import Subject

_AT_ONCE = 40


class Property(NamedTuple):
    """What is drawn, given whether float64 is and how many columns there may be, and what must hold."""

    examples: Callable[[bool, int], st.SearchStrategy[Any]]
    check: Callable[[Subject, Any], None]


PROPERTIES = {
    "shards": Property(lambda float64, longest: shards.sharded(float64, longest), shards.check),
    "calls": Property(lambda float64, longest: calls.call(float64, longest), calls.check),
    "linear": Property(lambda float64, _: linear.layer(float64), linear.check),
}


def longest_of(subject: Subject) -> int:
    """Columns that it gets through in reasonable time."""
    if subject.device.type == "cuda":
        return 200_000
    return 300 if subject.name == "triton-interpreter" else LONGEST


def explore(
    name: str,
    subject: Subject,
    examples: int,
    tally: Tally,
    number: int | None = None,
    shrink: bool = True,
    until: float = math.inf,
) -> None:
    """Run so many examples of a property, and note each; raises the simplest failure that hypothesis finds.

    Args:
        number: to draw the same ones again; None: others every time.
        until: the time after which what is left is let be, uncounted.
        shrink: look for the simplest failure; False: the first one will do.
    """
    prop = PROPERTIES[name]

    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)

    @settings(
        max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    @given(prop.examples(subject.name.startswith("torch"), longest_of(subject)))
    def holds(example: Any) -> None:
        if time.time() > until:
            return
        tally.note(example)
        prop.check(subject, example)

    (holds if number is None else seed(number)(holds))()


def work(
    properties: list[str], subject_name: str, examples: int, until: float | None
) -> tuple[dict[str, Tally], list[str]]:
    """One process's part: the tallies by property, and what failed."""
    from tests.conftest import make_subject

    subject = make_subject(subject_name)
    tallies = {name: Tally() for name in properties}
    failures: list[str] = []
    failed: set[str] = set()
    while len(failed) < len(properties):
        for name in properties:
            if name in failed:
                continue
            try:
                explore(name, subject, examples if until is None else _AT_ONCE, tallies[name], until=until or math.inf)
            except Exception:
                failures.append(f"{name}: {traceback.format_exc()}")
                failed.add(name)
            if until is not None and time.time() > until:
                return tallies, failures
        if until is None:
            break
    return tallies, failures
