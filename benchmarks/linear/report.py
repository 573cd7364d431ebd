"""A README of the fused linear + loss's results.csv, and pictures: time against extra memory, a picture a shape."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.linear import results
from benchmarks.linear.floors import FOUR, THREE
from benchmarks.linear.providers import KEEPS
from benchmarks.linear.verdict import NAMES, verdicts
from benchmarks.plots import Picture, save
from benchmarks.results import Row, as_markdown

_LEGEND = """\
Forward and backward of the mean loss of hidden weight^T, down to the gradients of both; medians over the rounds. In
every round everybody was timed in turn, floors included, on a device that is kept busy while the host queues.

- 3 GEMM, 4 GEMM: the products that cannot be spared where logits are made once, and where they are made twice, through
  the device's own library. Ratios to them are medians of the ratios within rounds: a GPU drifts by some percent.
- extra: peak memory above hidden states and weight, the gradients of both included.
- errors: against float64 of the same operands, in the 2-norm; of dW the larger one of the rows that are some token's
  target and of the others. "w": of sum(w L) with random token weights w, where the provider has that.
"""


def write(folder: Path) -> Path:
    """Write folder/README.md from folder/results.csv."""
    rows = results.read(folder / "results.csv")
    parts = ["# Measured times and memory of the fused linear + loss", _sources(rows), _LEGEND]
    pictures = {picture.name: picture for picture in draw(folder, rows)}
    for group in results.groups(rows):
        parts.append(f"## {results.title(group)}")
        if picture := pictures.get(_picture_name(group)):
            parts.append(f"![{picture.title}]({picture.name})")
        cells, notes = results.cells(group), results.notes(group)
        parts.append(as_markdown(cells, results.TABLE) if cells else "Nothing was measured.")
        parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
        if any(row["ms"] is not None for row in group):
            parts.append(as_markdown([verdict.cells() for verdict in verdicts(group)], NAMES))
    path = folder / "README.md"
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")
    return path


def draw(folder: Path, rows: list[Row]) -> list[Picture]:
    """Write a picture of every shape of which times and memory are known."""
    pictures = []
    for group in results.groups(rows):
        points = [row for row in group if row["ms"] is not None and row["extra_bytes"]]
        if not points:
            continue
        floors = {row["provider"]: row["ms"] for row in group if row["provider"] in (THREE, FOUR)}
        title = f"{points[0]['device']}, {results.title(group)}"
        save(folder / _picture_name(group), _figure(points, floors, title))
        pictures.append(Picture(_picture_name(group), f"time against extra memory: {title}"))
    return pictures


def _picture_name(group: list[Row]) -> str:
    return re.sub(r"\W+", "_", f"linear_{results.title(group)}") + ".png"


def _figure(rows: list[Row], floors: dict[str, float], title: str) -> Figure:
    """A curve of what keeps more and more logits, a point for everybody else, floors as lines."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    at = {row["provider"]: (row["extra_bytes"] / results.MIB, row["ms"]) for row in rows}
    curve: list[Any] = [at[name] for name in KEEPS if name in at]
    if curve:
        axes.plot(
            *zip(*curve, strict=True), label="te_ce, keep = recompute ... 1.0", color="C0", marker="o", linewidth=2.5
        )
    others = [name for name in at if name not in KEEPS]
    for number, name in enumerate(others):
        axes.plot(
            *at[name], label=name, color=f"C{1 + number % 9}", marker="sD^vPX*<>dh"[number % 11], linestyle="none"
        )
    for name, style in ((THREE, "--"), (FOUR, ":")):
        if name in floors:
            axes.axhline(
                floors[name], label=f"{name}, by the device's library", color="black", linestyle=style, linewidth=1
            )
    axes.set(xscale="log", yscale="log", xlabel="peak above operands, MiB", ylabel="forward + backward, ms")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _sources(rows: list[Row]) -> str:
    def every(name: str) -> str:
        return ", ".join(dict.fromkeys(str(row[name]) for row in rows if row[name]))

    versions = dict.fromkeys(f"{row['provider']} {row['version']}" for row in rows if row["version"])
    lines = [
        "| | |",
        "|---|---|",
        f"| device | {every('device')} |",
        f"| torch, Triton | {every('torch')}, {every('triton')} |",
        f"| versions | {'; '.join(versions)} |",
        f"| commit | {every('commit')} |",
        f"| rounds, runs in each | {every('rounds')}, {every('runs')} |",
        f"| standard deviation of the logits | {every('spread')} |",
    ]
    commands = dict.fromkeys(f"python -m {row['command']}" for row in rows if row["command"])
    return "\n".join([*lines, "", "```bash", *commands, "```"])
