"""`python -m tests.mutation [--jobs N] [WORD ...]`: every fault (or those whose words are given), and who notices.

Exit status 1 where one survives, or where a test fails without any. Over all of them it writes docs/mutation.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import tempfile
from pathlib import Path

from tests.mutation.faults import FAULTS, Fault
from tests.mutation.run import CHECKOUT, Survived, catch, check_without

REPORT = CHECKOUT / "docs" / "mutation.md"


def main(command: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="part of what a fault is")
    parser.add_argument("--jobs", type=int, default=2, help="at once (2)")
    arguments = parser.parse_args(command)
    chosen = [fault for fault in FAULTS if not arguments.words or any(word in fault.what for word in arguments.words)]
    if not chosen:
        parser.error(f"no fault with {' or '.join(arguments.words)}")
    caught: dict[Fault, str] = {}
    errors = []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        clean = [
            pool.submit(check_without, tests, ranks, Path(folder))
            for tests, ranks in dict.fromkeys((fault.tests, fault.ranks) for fault in chosen)
        ]
        jobs = {fault: pool.submit(catch, fault, Path(folder)) for fault in chosen}
        for each in clean:
            if isinstance(error := each.exception(), Survived):
                errors.append(str(error))
        for fault, job in jobs.items():
            try:
                caught[fault] = job.result()
                print(f"{fault.what}: {caught[fault]}", flush=True)
            except (Survived, ValueError) as error:
                errors.append(str(error))
    for line in errors:
        print(f"error: {line}", file=sys.stderr)
    print(f"{len(caught)} of {len(chosen)} faults caught")
    if not errors and len(caught) == len(FAULTS):
        REPORT.write_text(report(caught))
    return 1 if errors else 0


def report(caught: dict[Fault, str]) -> str:
    """All of docs/mutation.md."""
    rows = [f"| {fault.what} | {fault.file} | `{test.split(' - ')[0]}` |" for fault, test in caught.items()]
    head = [
        "# Faults put in on purpose, and the tests that notice",
        "",
        f"Made by `python -m tests.mutation`: {len(rows)} faults, each in a copy of the code; all are caught, and "
        "none of these tests fails without one.",
        "",
        "| fault | in | first test that fails |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
