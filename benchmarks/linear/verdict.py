"""The ratios that are promised of the fused linear + loss, beside those that were measured.

Every ratio is the median of the ratios within rounds. What was not measured is neither kept nor broken, and says so.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from benchmarks.linear.floors import FOUR, THREE
from benchmarks.linear.problem import Shape
from benchmarks.linear.providers import CCE, KEEP_ALL, KEEPS, LIGER_CHUNKED, QUACK, RECOMPUTE, TOKEN_WEIGHTS, VERL
from benchmarks.linear.results import MIB, samples_of, shape_of
from benchmarks.linear.rounds import ratio
from benchmarks.results import Row

NAMES = ["promise", "measured", "limit", "verdict"]
# Where the extra memory of recomputing is promised, in MiB.
MEMORY_SHAPE, MEMORY_LIMIT = Shape(8192, 4096, 128256), 1.7 * 1024

Group = dict[str, Row]


class Verdict(NamedTuple):
    """One promise on one shape; `measured` is None where somebody it speaks of was not measured."""

    promise: str
    measured: float | None
    limit: float
    at_least: bool = False

    @property
    def kept(self) -> bool | None:
        """None: not measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def cells(self) -> list[str]:
        """Cells under `NAMES`."""
        measured = "-" if self.measured is None else f"{self.measured:.4g}"
        verdict = {None: "not measured", True: "kept", False: "BROKEN"}[self.kept]
        return [self.promise, measured, f"{'>=' if self.at_least else '<='} {self.limit:.4g}", verdict]


def verdicts(rows: list[Row]) -> list[Verdict]:
    """Every promise, on the rows of one shape."""
    group = {row["provider"]: row for row in rows if row["status"] == "ok"}
    return [
        Verdict(f"{RECOMPUTE} over {FOUR}", _ratio(group, RECOMPUTE, FOUR), 1.04),
        Verdict(f"{KEEP_ALL} over {THREE}", _ratio(group, KEEP_ALL, THREE), 1.07),
        Verdict(f"{TOKEN_WEIGHTS} over {THREE}", _ratio(group, TOKEN_WEIGHTS, THREE), 1.06),
        Verdict(f"{TOKEN_WEIGHTS} over {QUACK}", _ratio(group, TOKEN_WEIGHTS, QUACK), 1.0),
        Verdict(f"{VERL} over {RECOMPUTE}", _ratio(group, VERL, RECOMPUTE), 1.4, at_least=True),
        Verdict(f"{LIGER_CHUNKED} over {RECOMPUTE}", _ratio(group, LIGER_CHUNKED, RECOMPUTE), 1.75, at_least=True),
        Verdict(f"{CCE} over {RECOMPUTE}", _ratio(group, CCE, RECOMPUTE), 1.4, at_least=True),
        Verdict("keeping more over keeping less, largest", _largest_step(group), 1.0),
        *_memory(group, rows),
    ]


def _ratio(group: Group, name: str, other: str) -> float | None:
    row, other_row = group.get(name, {}), group.get(other, {})
    times, others = samples_of(row), samples_of(other_row)
    # Rounds of different runs have nothing in common.
    return ratio(times, others) if times and others and row["run"] == other_row["run"] else None


def _largest_step(group: Group) -> float | None:
    """Of the ratios of each share of kept logits to the next smaller one."""
    steps = [_ratio(group, more, less) for less, more in itertools.pairwise(KEEPS)]
    known = [step for step in steps if step is not None]
    return max(known) if len(known) == len(steps) else None


def _memory(group: Group, rows: list[Row]) -> list[Verdict]:
    if not rows or shape_of(rows[0]) != MEMORY_SHAPE:
        return []
    extra = group.get(RECOMPUTE, {}).get("extra_bytes")
    return [Verdict(f"{RECOMPUTE}, extra MiB", extra / MIB if extra else None, MEMORY_LIMIT)]
