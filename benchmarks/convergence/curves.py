"""What the runs left: curves, step times, memory; and how far apart two runs are."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.convergence.runs import ABOUT, Run

WINDOW = 50
"""Steps over which a curve is averaged where it is compared: a single step's loss is that of its batch."""


@dataclass(frozen=True)
class Curve:
    """A run as its metrics.csv has it.

    Args:
        run: its loss and seed.
        command: that made it.
        model: what ran on what, as the example's first line says.
        train, norms: loss (nats a token) and norm of the gradient at every step; no norms without clipping.
        held_out: (step, loss).
        tokens_per_second: between two log lines, the first such stretch left out: it compiles and allocates.
        peak_mib: the most memory of rank 0.
    """

    run: Run
    command: str
    model: str
    train: tuple[float, ...]
    norms: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]
    tokens_per_second: tuple[float, ...]
    peak_mib: float

    @property
    def speed(self) -> float:
        """Median tokens per second."""
        return statistics.median(self.tokens_per_second) if self.tokens_per_second else math.nan


def read(folder: Path) -> list[Curve]:
    """Every run in `folder`, in the order of their names.

    Raises:
        ValueError: there is none, or two have different numbers of steps.
    """
    curves = [_read(file.parent) for file in sorted(folder.glob(f"*/{ABOUT}"))]
    if not curves:
        raise ValueError(f"{folder}: expected the folders of runs, found none")
    lengths = {curve.run.name: len(curve.train) for curve in curves}
    if len(set(lengths.values())) != 1 or not curves[0].train:
        raise ValueError(f"{folder}: expected runs of equally many steps, found {lengths}")
    return curves


def _read(folder: Path) -> Curve:
    about = json.loads((folder / ABOUT).read_text())
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    stretches = [float(row["tokens_per_second"]) for row in rows if row["tokens_per_second"]]
    return Curve(
        run=Run(about["loss"], about["seed"], about["again"]),
        command=about["command"],
        model=about["model"],
        train=tuple(float(row["train_loss"]) for row in rows if row["train_loss"]),
        norms=tuple(float(row["gradient_norm"]) for row in rows if row["gradient_norm"]),
        held_out=tuple((int(row["step"]), float(row["held_out_loss"])) for row in rows if row["held_out_loss"]),
        tokens_per_second=tuple(stretches[1:]),
        peak_mib=max((float(row["peak_memory_mib"]) for row in rows if row["peak_memory_mib"]), default=math.nan),
    )


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of each `window` values in a row (of all, if there are fewer)."""
    window = min(window, len(values))
    sums = [math.fsum(values[:window])]
    for leaving, entering in zip(values, values[window:], strict=False):
        sums.append(sums[-1] + entering - leaving)
    return [each / window for each in sums]


@dataclass(frozen=True)
class Distance:
    """How far two runs are apart, in nats: the largest difference of the smoothed training losses, and the last.

    Args:
        largest, last: of the smoothed training losses.
        held_out: of the last held-out losses.
        norms: largest relative difference of the smoothed gradient norms; NaN without norms.
    """

    largest: float
    last: float
    held_out: float
    norms: float


def distance(a: Curve, b: Curve) -> Distance:
    """Of two runs of equally many steps."""
    losses = [abs(x - y) for x, y in zip(smoothed(a.train), smoothed(b.train), strict=True)]
    norms = [math.nan]
    if a.norms and b.norms:
        norms = [abs(x - y) / y for x, y in zip(smoothed(a.norms), smoothed(b.norms), strict=True)]
    return Distance(max(losses), losses[-1], abs(a.held_out[-1][1] - b.held_out[-1][1]), max(norms))


def is_within(ours: Distance, spread: Distance) -> bool:
    """Whether a run is no further from Megatron's than another run of Megatron's own is."""
    return ours.largest <= spread.largest and ours.held_out <= spread.held_out
