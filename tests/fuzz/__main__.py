"""`python -m tests.fuzz`: long runs. Prints a line for every property, and exits with 1 where one does not hold.

python -m tests.fuzz --examples 7000 --jobs 2                              the plain-torch twin
TRITON_INTERPRET=1 python -m tests.fuzz --subject triton-interpreter       the kernels, interpreted
python -m tests.fuzz --subject triton-cuda --minutes 10                    the kernels on a GPU
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import time

from tests.fuzz.properties import PROPERTIES, work
from tests.fuzz.tally import Tally


def main(command: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("properties", nargs="*", default=list(PROPERTIES), metavar="PROPERTY", help="default: all")
    parser.add_argument("--subject", default="torch-cpu", help="what is tested (torch-cpu)")
    parser.add_argument("--examples", type=int, default=200, help="of every property (200)")
    parser.add_argument("--minutes", type=float, help="for all properties together, instead")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    arguments = parser.parse_args(command)
    unknown = set(arguments.properties) - set(PROPERTIES)
    if unknown:
        parser.error(f"expected properties among {', '.join(PROPERTIES)}, got {', '.join(sorted(unknown))}")
    until = None if arguments.minutes is None else time.time() + 60 * arguments.minutes
    each = -(-arguments.examples // arguments.jobs)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as pool:
        jobs = [pool.submit(work, arguments.properties, arguments.subject, each, until) for _ in range(arguments.jobs)]
        parts = [job.result() for job in jobs]
    for name in arguments.properties:
        total = Tally()
        for tallies, _ in parts:
            total.add(tallies[name])
        print(total.text(f"{arguments.subject}, {name}"))
    failures = [failure for _, found in parts for failure in found]
    print("\n\n".join(failures) or "no failure")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
