"""A README of results.csv: `python -m benchmarks.report DIR` writes DIR/README.md and the pictures it links to."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.linear import report as linear_report
from benchmarks.linear import results as linear_results
from benchmarks.plots import draw
from benchmarks.results import PROFILE, Row, as_markdown, header, read, tables

_HEADINGS = {"logits": "One process", "tp": "Vocabulary over ranks"}

_LEGEND = """\
Milliseconds, medians; each run starts with restored logits and a cold L2 cache. Every provider's loss and gradient were
compared with float64 first; those that were wrong are listed without times.

- fwd, bwd, both: forward without gradients, backward, forward and backward, on a device that is kept busy while the
  host queues them. Under tensor parallelism: the slowest rank.
- floor: three passes over the logits (read; read and write) at the copy bandwidth measured in the same run, as a share
  of the time of both. Ignored rows and padding are counted as if they were read and written.
- eager: both, started on an idle device: gaps between launches count. graph: the same, replayed from a CUDA graph.
- extra: peak memory above the logits, as a multiple of this rank's logits.
- speed-up: of te_ce over the provider, both.
- The upstream gradient is one number per row, except for Liger: its loss is the sum over the rows, with upstream
  gradient 1, which is its fastest form.
"""


def write(folder: Path) -> Path:
    """Write folder/README.md from folder/results.csv."""
    if header(folder / "results.csv") == linear_results.COLUMNS:
        return linear_report.write(folder)
    rows = read(folder / "results.csv")
    parts = ["# Measured times and memory of the loss", _sources(rows), _LEGEND]
    pictures = draw(folder)
    for kind, heading in _HEADINGS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        if not chosen:
            continue
        parts.append(f"## {heading}")
        parts += [f"![{title}]({name})" for name, title in pictures if name.startswith(kind)]
        for title, cells, notes in tables(chosen):
            parts += [f"### {title}", as_markdown(cells) if cells else "Nothing was timed."]
            parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
    parts += ["## Host time and errors", _details(rows)]
    path = folder / "README.md"
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")
    return path


def _sources(rows: list[Row]) -> str:
    def every(name: str) -> str:
        return ", ".join(dict.fromkeys(str(row[name]) for row in rows if row[name]))

    copies, reads = (sorted({float(row[name]) for row in rows}) for name in ("copy_GBs", "read_GBs"))
    versions = dict.fromkeys(f"{row['provider']} {row['version']}" for row in rows if row["version"])
    lines = [
        "| | |",
        "|---|---|",
        f"| device | {every('device')} |",
        f"| measured bandwidth | copy {_span(copies)} GB/s (read and write counted), read {_span(reads)} GB/s |",
        f"| torch, Triton | {every('torch')}, {every('triton')} |",
        f"| versions | {'; '.join(versions)} |",
        f"| commit | {every('commit')} |",
        f"| timed runs | {every('runs')} |",
    ]
    commands = [_command(row) for row in rows if row["command"]]
    return "\n".join([*lines, "", "```bash", *dict.fromkeys(commands), "```"])


def _command(row: Row) -> str:
    if row["kind"] == "tp":
        return f"torchrun --nproc-per-node {row['ranks']} -m {row['command']}"
    return f"python -m {row['command']}"


def _span(values: list[float]) -> str:
    low, high = f"{values[0]:.0f}", f"{values[-1]:.0f}"
    return low if low == high else f"{low} to {high}"


def _details(rows: list[Row]) -> str:
    """Per provider: host time, the largest errors of all its cases, collectives."""
    lines = [
        "Host microseconds of one forward and backward of a tiny problem; the largest relative errors against float64",
        "(gradient: in the 2-norm, targets' columns and others apart) by dtype; collectives in one forward.",
        "",
        "| provider | kind | dtype | host µs | loss error | gradient error | collectives | overwrites the logits |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    done = [
        row for row in rows if row["status"] == "ok" and (row["loss_error"] is not None or row["option"] == PROFILE)
    ]
    for key in dict.fromkeys((row["provider"], row["kind"], row["dtype"]) for row in done):
        group = [row for row in done if (row["provider"], row["kind"], row["dtype"]) == key]
        cells = [
            _largest(group, "host_us", ".0f"),
            _largest(group, "loss_error", ".1e"),
            _largest(group, "gradient_error", ".1e"),
            _largest(group, "collectives", ".0f"),
            group[0]["overwrites"],
        ]
        lines.append("| " + " | ".join([*key, *cells]) + " |")
    return "\n".join(lines)


def _largest(rows: Iterable[Row], name: str, form: str) -> str:
    values = [row[name] for row in rows if row[name] is not None]
    return format(max(values), form) if values else "-"


def main(command: list[str] | None = None) -> None:
    """Report on the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of results.csv")
    print(write(parser.parse_args(command).folder).name)


if __name__ == "__main__":
    main()
