"""`python -m tests.mutation [NAME ...] [--jobs N]`: every fault (or those with these names), and who notices.

A name may be a part of one. Exit status 1 where a fault survives, or where a test fails without any. Over all of them
it writes docs/mutation.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.fault import Fault
from tests.mutation.faults import FAULTS
from tests.mutation.run import CHECKOUT, Place, Survived, catch, check_without

REPORT = CHECKOUT / "docs" / "mutation.md"


def main(command: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a fault, or a part of it")
    parser.add_argument("--jobs", type=int, default=2, help="at once (2)")
    arguments = parser.parse_args(command)
    for name in arguments.names:
        if not any(name in fault.name for fault in FAULTS):
            parser.error(f"no fault with {name!r} in its name")
    chosen = [fault for fault in FAULTS if not arguments.names or any(name in fault.name for name in arguments.names)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        errors = without(chosen, Path(folder), pool)
        caught: dict[Fault, str] = {}
        if not errors:
            caught, errors = each(chosen, Path(folder), pool)
    if caught:
        print(f"\n{table(caught)}\n")
    for line in errors:
        print(f"error: {line}", file=sys.stderr)
    print(f"{len(caught)} of {len(chosen)} faults caught")
    if not errors and len(caught) == len(FAULTS):
        REPORT.write_text(report(caught))
    return 1 if errors else 0


def without(faults: list[Fault], folder: Path, pool: ThreadPoolExecutor) -> list[str]:
    """Run the tests of all faults where there is none; returns what is wrong with them."""
    tests: dict[Place, dict[str, None]] = {}
    for fault in faults:
        tests.setdefault(Place(fault.environment, fault.ranks), {}).update(dict.fromkeys(fault.tests))
    jobs = [pool.submit(check_without, named, place, folder) for place, named in tests.items()]
    return [str(error) for job in jobs if (error := job.exception()) is not None]


def each(faults: list[Fault], folder: Path, pool: ThreadPoolExecutor) -> tuple[dict[Fault, str], list[str]]:
    """Try every fault; returns the tests that notice, and what is wrong with the faults of the others."""
    jobs = {pool.submit(catch, fault, folder): fault for fault in faults}
    caught, errors = {}, []
    for job in concurrent.futures.as_completed(jobs):
        try:
            caught[jobs[job]] = job.result()
        except (Survived, ValueError) as error:
            errors.append(str(error))
        print(".", end="", flush=True)
    return {fault: caught[fault] for fault in faults if fault in caught}, errors


def table(caught: dict[Fault, str]) -> str:
    """Markdown."""
    rows = [f"| {fault.name} | {fault.file} | `{test}` |" for fault, test in caught.items()]
    return "\n".join(["| fault | file | caught by |", "|---|---|---|", *rows])


def report(caught: dict[Fault, str]) -> str:
    """All of docs/mutation.md."""
    head = (
        "# Faults put in on purpose, and the tests that notice\n\n"
        f"Made by `make mutation`: {len(caught)} faults, each in a copy of the code; all are caught, and none of these "
        "tests fails without one.\n\n"
    )
    return f"{head}{table(caught)}\n"


if __name__ == "__main__":
    sys.exit(main())
