"""Everybody in turn, round by round, and ratios within rounds.

A GPU at its power limit drifts by some percent while it heats up: milliseconds of different minutes cannot be compared.
In every round each function runs for a while without a pause, floors included, in an order drawn anew; a ratio is the
median over the rounds of the ratios within each.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

from benchmarks.measure import Stopwatch

Timed = Callable[[object], object]


def take_turns(functions: dict[str, Timed], watch: Stopwatch, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every function in every round, in the middle of its `watch.runs` runs there."""
    shuffled = random.Random(0)
    order = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        # Not a rotation: whoever always came after the same neighbour would always find the GPU as that one left it.
        shuffled.shuffle(order)
        for name in order:
            samples[name].append(watch.sustained_ms(functions[name]))
    return samples


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds of time / other's time."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))
