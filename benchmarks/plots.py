"""Pictures of results.csv: `python -m benchmarks.plots DIR` writes PNG files beside it.

Time and memory of forward and backward, against the vocabulary at the number of rows that was measured most, and
against the rows at the vocabulary that was measured most; one line per provider, and the floor. Log axes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.results import Row, read

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MIB = 2**20
_AXES = {"columns": ("vocabulary", "rows"), "rows": ("rows", "columns")}


class Picture(NamedTuple):
    """A file in the folder, and what it shows."""

    name: str
    title: str


class _Quantity(NamedTuple):
    name: str
    label: str
    value: Callable[[Row], float | None]
    floor: Callable[[Row], float]
    floor_label: str


_QUANTITIES = [
    _Quantity(
        name="time",
        label="forward + backward, ms",
        value=lambda row: row["both_ms"],
        floor=lambda row: 3 * _logits_bytes(row) / (float(row["copy_GBs"]) * 1e6),
        floor_label="floor: three passes at copy bandwidth",
    ),
    _Quantity(
        name="memory",
        label="peak above the logits, MiB (less than 1 is drawn as 1)",
        value=lambda row: None if row["extra_bytes"] is None else max(1.0, row["extra_bytes"] / _MIB),
        floor=lambda row: max(1.0, _logits_bytes(row) / _MIB),
        floor_label="the logits themselves",
    ),
]


def draw(folder: Path) -> list[Picture]:
    """Write every picture that the rows of folder/results.csv make possible: at least two points on its axis."""
    rows = [row for row in read(folder / "results.csv") if row["status"] == "ok" and row["option"] == "plain"]
    rows = [row for row in rows if row["both_ms"] is not None]
    pictures = []
    for kind, ranks, dtype in dict.fromkeys((row["kind"], row["ranks"], row["dtype"]) for row in rows):
        group = [row for row in rows if (row["kind"], row["ranks"], row["dtype"]) == (kind, ranks, dtype)]
        for axis, (axis_label, fixed) in _AXES.items():
            line, at = _line(group, axis, fixed)
            for quantity in _QUANTITIES:
                points = [row for row in line if quantity.value(row) is not None]
                if len({row[axis] for row in points}) < 2:
                    continue
                over = f", {ranks} ranks" if ranks > 1 else ""
                title = f"{points[0]['device']}{over}, {dtype}, {_AXES[fixed][0]} {at}"
                name = f"{kind}_{dtype}_{quantity.name}_by_{axis_label}{f'_{ranks}_ranks' if ranks > 1 else ''}.png"
                save(folder / name, _figure(points, axis, axis_label, quantity, title))
                pictures.append(Picture(name, f"{quantity.label.split(',')[0]} by {axis_label}: {title}"))
    return pictures


def _line(rows: list[Row], axis: str, fixed: str) -> tuple[list[Row], int]:
    """The rows at the value of `fixed` with most values on `axis`, in the order of `axis`; and that value."""
    counts = Counter(value for value, _ in {(row[fixed], row[axis]) for row in rows})
    at = max(counts, key=lambda value: (counts[value], value))
    return sorted((row for row in rows if row[fixed] == at), key=lambda row: row[axis]), at


def _figure(rows: list[Row], axis: str, axis_label: str, quantity: _Quantity, title: str) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, provider in enumerate(dict.fromkeys(row["provider"] for row in rows)):
        line = [row for row in rows if row["provider"] == provider]
        ours = provider.startswith("te_ce")
        axes.plot(
            [row[axis] for row in line],
            [quantity.value(row) for row in line],
            label=provider,
            color=f"C{number % 10}",
            marker="osD^vPX*<>dh"[number % 12],
            markersize=4,
            linewidth=2.5 if ours else 1.2,
            linestyle="-" if number < 10 else ":",
        )
    _draw_floor(axes, rows, axis, quantity)
    axes.set(xscale="log", yscale="log", xlabel=axis_label, ylabel=quantity.label)
    axes.set_title(title, fontsize=10)
    axes.set_xticks(sorted({row[axis] for row in rows}), [str(x) for x in sorted({row[axis] for row in rows})])
    axes.tick_params(axis="x", labelrotation=45, labelsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _draw_floor(axes: Axes, rows: list[Row], axis: str, quantity: _Quantity) -> None:
    at = {row[axis]: quantity.floor(row) for row in rows}
    places: list[Any] = sorted(at)
    axes.plot(places, [at[x] for x in places], label=quantity.floor_label, color="black", linestyle="--", linewidth=1)


def save(path: Path, figure: Figure) -> None:
    """Write a PNG file."""
    FigureCanvasAgg(figure).print_figure(path, dpi=130)


def _logits_bytes(row: Row) -> float:
    """Of one rank."""
    return row["rows"] * row["columns"] / row["ranks"] * _ITEM_BYTES[row["dtype"]]


def main(command: list[str] | None = None) -> None:
    """Draw the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of results.csv")
    for picture in draw(parser.parse_args(command).folder):
        print(picture.name)


if __name__ == "__main__":
    main()
