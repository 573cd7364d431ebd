"""The columns of results.csv of the fused linear + loss, its reader, and the tables that are made of its rows.

One row per shape, dtype and provider; the floors are providers too. `samples` are the milliseconds of the rounds, in
their order: whatever is compared later is compared within rounds.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.linear.floors import FOUR, THREE
from benchmarks.linear.problem import Shape
from benchmarks.linear.rounds import ratio
from benchmarks.measure import Timing
from benchmarks.results import Row

KEY = ["kind", "rows", "hidden", "columns", "dtype", "provider"]
NUMBERS = [
    # Forward and backward of the mean loss; over the floors of the same rounds.
    *("ms", "ms_low", "ms_high", "x_three", "x_four"),
    # Peak above the operands, gradients included.
    "extra_bytes",
    # Against float64; gradients in the 2-norm, of the mean and of sum(w L).
    *("loss_error", "dx_error", "dw_error", "weighted_dx_error", "weighted_dw_error"),
]
# run: the same for all rows whose rounds were the same ones.
SOURCES = ["run", "version", "rounds", "runs", "spread", "device", "torch", "triton", "commit", "command"]
# status: ok, failed, missing, skipped or "out of memory"; note: the reason.
COLUMNS = [*KEY, "status", "note", *NUMBERS, "samples", *SOURCES]

TABLE = ["provider", "ms", "x 3 GEMM", "x 4 GEMM", "extra MiB", "err dX", "err dW", "err dX, w", "err dW, w"]

MIB = 2**20


def timed(row: Row, samples: dict[str, list[float]]) -> Row:
    """The row with its times and ratios, from everybody's milliseconds by round."""
    own = samples[row["provider"]]
    timing = Timing.of(own)
    return {
        **row,
        "ms": timing.median,
        "ms_low": timing.low,
        "ms_high": timing.high,
        "x_three": ratio(own, samples[THREE]),
        "x_four": ratio(own, samples[FOUR]),
        "samples": " ".join(f"{each:.5g}" for each in own),
    }


def samples_of(row: Row) -> list[float]:
    """Milliseconds by round; none where nothing was timed."""
    return [float(each) for each in str(row.get("samples") or "").split()]


def read(path: Path) -> list[Row]:
    """Rows of a results.csv, numbers as floats and None where there is none; the later of equal keys, in file order."""
    latest: dict[tuple[str, ...], Row] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            row: Row = dict(line)
            for name in NUMBERS:
                row[name] = float(row[name]) if row[name] else None
            for name in Shape._fields:
                row[name] = int(row[name])
            latest[tuple(str(row[name]) for name in KEY)] = row
    return list(latest.values())


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of one shape and dtype each, in the order of their first row."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in KEY[:-1]), []).append(row)
    return list(found.values())


def shape_of(row: Row) -> Shape:
    """The shape of a row."""
    return Shape(*(int(row[name]) for name in Shape._fields))


def title(group: list[Row]) -> str:
    """What the rows of a group share."""
    return f"{shape_of(group[0])} {group[0]['dtype']}"


def cells(group: list[Row]) -> list[list[str]]:
    """Cells under `TABLE`, of the rows that were measured."""
    return [_cells(row) for row in group if row["status"] == "ok"]


def notes(group: list[Row]) -> list[str]:
    """Who was not measured, and why; how far the floor drifted."""
    why: dict[str, list[str]] = {}
    for row in group:
        if row["status"] != "ok":
            why.setdefault(f"{row['status']}: {row['note']}", []).append(row["provider"])
    lines = [f"{'; '.join(names)}: {text}" for text, names in why.items()]
    drift = [samples_of(row) for row in group if row["provider"] == THREE and row.get("ms")]
    if drift:
        low, high, middle = min(drift[0]), max(drift[0]), statistics.median(drift[0])
        lines.append(f"{THREE}: {low:.4g} to {high:.4g} ms over {len(drift[0])} rounds ({(high - low) / middle:.1%})")
    return lines


def _cells(row: Row) -> list[str]:
    def number(name: str, form: str, unit: float = 1.0) -> str:
        value = row.get(name)
        return "-" if value in (None, "") else format(value / unit, form)

    errors = [number(name, ".1e") for name in ("dx_error", "dw_error", "weighted_dx_error", "weighted_dw_error")]
    ratios = [number("x_three", ".3f"), number("x_four", ".3f")]
    return [row["provider"], number("ms", ".2f"), *ratios, number("extra_bytes", ".0f", MIB), *errors]
