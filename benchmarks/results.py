"""The columns of results.csv, its writer and reader, and the tables that are made of its rows.

One row per kind (logits: one process; tp: one per rank), shape over all ranks, dtype, option and provider. Times are
milliseconds: the median, and for device times the 20th and 80th percentile. A file that is already there is
continued; of two rows that differ in nothing but their numbers, the later one counts.
"""

from __future__ import annotations

import csv
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Bandwidth

Row = dict[str, Any]

# Rows with this option hold counts of collectives, no times.
PROFILE = "profile"

KEY = ["kind", "ranks", "rows", "columns", "dtype", "option", "provider"]
NUMBERS = [
    *("fwd_ms", "fwd_low", "fwd_high", "bwd_ms", "bwd_low", "bwd_high", "both_ms", "both_low", "both_high"),
    # Forward and backward as a user sees them, launched one by one and replayed from a CUDA graph; the host's part.
    *("eager_ms", "eager_low", "eager_high", "graph_ms", "graph_low", "graph_high", "host_us"),
    # Floor over time. fwd: one read at read bandwidth; fwd_copy and both: one and three passes at copy bandwidth.
    *("share_fwd", "share_fwd_copy", "share_both"),
    # Peak above the logits: of this rank's logits, and in bytes.
    *("extra", "extra_bytes"),
    *("loss_error", "gradient_error"),
    # In a profile of one forward, and of one forward and backward.
    *("collectives", "nccl_kernels"),
]
SOURCES = ["version", "overwrites", "runs", "device", "torch", "triton", "commit", "copy_GBs", "read_GBs", "command"]
# status: ok, failed, missing, unsupported, skipped or "out of memory"; note: the reason, or why there is no graph.
COLUMNS = [*KEY, "status", "note", *NUMBERS, *SOURCES]

# floor: share of it that forward and backward reach; speed-up: of te_ce over the provider.
TABLE = ["provider", "fwd", "bwd", "both", "floor", "eager", "graph", "extra", "speed-up"]


class Writer:
    """Appends rows to a CSV file, each on disk before the next is measured."""

    def __init__(self, path: Path, columns: list[str] = COLUMNS) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size and header(path) != columns:
            raise ValueError(f"{path.name}: expected the columns of this version, found others; give another --out")
        self._file = path.open("a", newline="")
        self._csv = csv.DictWriter(self._file, columns, restval="")
        if not path.stat().st_size:
            self._csv.writeheader()

    def write(self, row: Row) -> None:
        """Append one row; columns that it lacks stay empty."""
        self._csv.writerow({name: _text(value) for name, value in row.items()})
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[Row]:
    """Rows of a results.csv, numbers as floats and None where there is none; the later of equal keys, in file order."""
    latest: dict[tuple[str, ...], Row] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            row: Row = dict(line)
            for name in NUMBERS:
                row[name] = float(row[name]) if row[name] else None
            for name in ("ranks", "rows", "columns"):
                row[name] = int(row[name])
            latest[tuple(str(row[name]) for name in KEY)] = row
    return list(latest.values())


def sources(
    device: torch.device, ceilings: Bandwidth | None, runs: int, arguments: list[str], module: str, commit: str | None
) -> Row:
    """The columns that say where the numbers come from; `commit` where git can't tell."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    on_gpu = device.type == "cuda"
    return {
        "runs": runs,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU {platform.machine()}",
        "torch": str(torch.__version__),
        "triton": triton_version,
        "commit": commit or _commit(),
        **({"copy_GBs": ceilings.copy / 1e9, "read_GBs": ceilings.read / 1e9} if ceilings else {}),
        "command": " ".join([module, *_without_folder(arguments)]),
    }


def reason(error: BaseException | str) -> str:
    """The first line of an error, without paths of this machine, short enough for a table."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    line = text.strip().splitlines()[0] if text.strip() else "no message"
    line = re.sub(r"\s*\(?(?<![\w.])/[\w.+-]+(?:/[\w.+-]+)+\)?", "", line)
    return line if len(line) <= 160 else line[:157] + "..."


def tables(rows: Iterable[Row]) -> list[tuple[str, list[list[str]], list[str]]]:
    """Rows in groups of one shape, dtype and option: title, cells under `TABLE`, and notes on rows without times."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["option"] == PROFILE:
            continue
        groups.setdefault(tuple(row[name] for name in KEY[:-1]), []).append(row)
    return [_table(group) for group in groups.values()]


def as_text(cells: list[list[str]], names: list[str] = TABLE) -> str:
    """A table for a terminal."""
    lines = [names, *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def as_markdown(cells: list[list[str]], names: list[str] = TABLE) -> str:
    """A table for a README."""
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _table(group: list[Row]) -> tuple[str, list[list[str]], list[str]]:
    first = group[0]
    shape = f"{first['rows']} x {first['columns']} {first['dtype']}"
    ranks = f", {first['ranks']} ranks" if int(first["ranks"]) > 1 else ""
    option = "" if first["option"] == "plain" else f", {first['option']}"
    ours = next((row["both_ms"] for row in group if row["provider"] == "te_ce" and row["status"] == "ok"), None)
    cells = [_cells(row, ours) for row in group if row["status"] == "ok"]
    why: dict[str, list[str]] = {}
    for row in group:
        if row["status"] != "ok":
            why.setdefault(f"{row['status']}: {row['note']}", []).append(row["provider"])
    notes = [f"{'; '.join(names)}: {text}" for text, names in why.items()]
    return shape + ranks + option, cells, notes


def _cells(row: Row, ours: float | None) -> list[str]:
    def number(name: str, form: str) -> str:
        value = row.get(name)
        return "-" if value in (None, "") else format(value, form)

    both = row.get("both_ms")
    faster = f"{both / ours:.2f}x" if both and ours else "-"
    times = [number(name, ".3f") for name in ("fwd_ms", "bwd_ms", "both_ms")]
    rest = [number("eager_ms", ".3f"), number("graph_ms", ".3f"), number("extra", ".2f")]
    return [row["provider"], *times, number("share_both", ".0%"), *rest, faster]


def header(path: Path) -> list[str]:
    """The columns of a results.csv; none of an empty file."""
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def _text(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip() or "unknown"


_LEFT_OUT = ("--out", "--commit")


def _without_folder(arguments: list[str]) -> list[str]:
    """The command line without where its results go, and without what its other columns say."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in _LEFT_OUT:
            kept.append(f'"{argument}"' if " " in argument else argument)
        skip = argument in _LEFT_OUT
    return kept
