"""The command line that the benchmarks of one process and of ranks share."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.providers import LOADERS


def add_arguments(parser: argparse.ArgumentParser, shapes: list[str], runs: int, names: list[str]) -> None:
    """The arguments that both commands take."""
    parser.add_argument(
        "--shapes", nargs="+", type=rows_and_columns, default=list(map(rows_and_columns, shapes)), metavar="NxV"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--providers", nargs="+", default=names, choices=list(LOADERS), metavar="NAME")
    parser.add_argument(
        "--skip", nargs="+", default=[], type=_skip, metavar="NAME[@NxV]", help="leave a provider (at a shape) out"
    )
    parser.add_argument("--runs", type=int, default=runs, help="timed runs of each function")
    parser.add_argument("--label-smoothing", type=float, default=0.0, help="also measure with this much smoothing")
    parser.add_argument("--ignored", type=float, default=0.0, help="also measure with this share of ignored rows")
    parser.add_argument("--padding", type=int, default=0, help="also measure with this many columns as padding")
    parser.add_argument("--commit", help="of the code that is measured, where git can't tell")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder of results.csv")


def _skip(text: str) -> str:
    name, _, shape = text.partition("@")
    if name not in LOADERS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(LOADERS)}, got {name!r}")
    if shape:
        rows_and_columns(shape)
    return text


def rows_and_columns(text: str) -> tuple[int, int]:
    """A shape of the command line."""
    try:
        rows, columns = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected rows x columns such as 8192x128256, got {text!r}") from None
    if rows < 1 or columns < 1:
        raise argparse.ArgumentTypeError(f"expected at least one row and one column, got {text!r}")
    return rows, columns
