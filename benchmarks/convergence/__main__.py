"""`python -m benchmarks.convergence --out DIR [--ranks R] [--at-once N] [section.key=value ...]`.

Trains examples/pretrain_gpt.py once with every loss from one seed, and Megatron's own again from that seed and from
another, then writes DIR/README.md with a table and curves. What follows the options are settings of the example.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.convergence import report
from benchmarks.convergence.runs import execute, planned


def main(command: list[str] | None = None) -> Path:
    """Run the command line; returns the report's path."""
    parser = argparse.ArgumentParser(prog="benchmarks.convergence", description=(__doc__ or "").splitlines()[2])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and the report")
    losses = "unfused,te_ce,te_ce_linear"
    parser.add_argument("--losses", default=losses, type=lambda text: text.split(","), metavar="NAME,NAME")
    parser.add_argument("--ranks", type=int, default=1, help="of each run, all of them tensor parallel")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time; more than 1 makes step times worthless")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--other-seed", type=int, default=4321, help="of one more run of the first loss")
    parser.add_argument(
        "--no-spread", action="store_true", help="no repetitions of the first loss: time and memory only"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(command)
    reference = arguments.losses[0]
    runs = planned(arguments.losses, arguments.seed, None if arguments.no_spread else arguments.other_seed)
    execute(runs, arguments.out, arguments.ranks, arguments.at_once, arguments.overrides)
    path = report.write(arguments.out, reference)
    print(path.read_text())
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
