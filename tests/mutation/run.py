"""A copy of the code with one fault, and what its tests say; and all of these tests without any."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.mutation.fault import Fault
from tests.support import outcomes as recorded

CHECKOUT = Path(__file__).resolve().parents[2]
_COPIED = ("te_ce", "megatron_patch", "tests", "benchmarks", "examples", "pyproject.toml")
_PLUGIN = "te_ce_outcomes"


class Survived(Exception):
    """No test noticed, or the tests say nothing."""


class Place(NamedTuple):
    """Where tests run: what they need besides the code."""

    environment: tuple[tuple[str, str], ...] = ()
    ranks: int = 1


class Outcomes(NamedTuple):
    """What pytest said.

    Attributes:
        status: exit statuses of its processes, but for ranks that the launcher ended.
        tests: outcomes of every test on these ranks.
        output: the end of what was printed.
    """

    status: set[int]
    tests: dict[str, set[str]]
    output: str

    def failed(self, named: Iterable[str]) -> list[str]:
        """The tests that failed, of those that are named."""
        return [test for test, found in self.tests.items() if "failed" in found and belongs(test, named)]


def belongs(test: str, named: Iterable[str]) -> bool:
    """Whether a test is one of the named node ids, or one of their parameters or members."""
    return any(test == each or test.startswith((f"{each}[", f"{each}::")) for each in named)


def copied(folder: Path) -> Path:
    """The code, in a new folder within `folder`."""
    copy = Path(tempfile.mkdtemp(dir=folder))
    for name in _COPIED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.png", "*.csv"))
        else:
            shutil.copy(source, copy / name)
    # By another name: it comes before whatever the tests import.
    shutil.copy(recorded.__file__, copy / f"{_PLUGIN}.py")
    return copy


def planted(fault: Fault, code: Path) -> None:
    """Put the fault in.

    Raises:
        ValueError: its text is not there once.
    """
    path = code / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name}: expected its text once in {fault.file}, found it {text.count(fault.old)} times"
        )
    path.write_text(text.replace(fault.old, fault.new))


def pytest_of(tests: Iterable[str], place: Place, code: Path) -> Outcomes:
    """Run tests in the copy, up to the first that fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(place.ranks)]
    command = [sys.executable, *(launcher if place.ranks > 1 else []), "-m", "pytest", "-x", "-q", "--rootdir", "."]
    command += ["-p", _PLUGIN, "-p", "no:cacheprovider", "--timeout", "120", *tests]
    with tempfile.TemporaryDirectory() as folder:
        ours = {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", recorded.FOLDER: folder}
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= ours | dict(place.environment)
        done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, check=False)
        files = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    outcomes: dict[str, set[str]] = {}
    for file in files:
        for test, outcome in file["outcomes"].items():
            outcomes.setdefault(test, set()).add(outcome)
    status = {file["status"] for file in files} or {done.returncode}
    return Outcomes(status, outcomes, f"{done.stdout[-800:]}{done.stderr[-400:]}")


def catch(fault: Fault, folder: Path) -> str:
    """The test that notices.

    Raises:
        Survived: none does; they passed, or did not run.
        ValueError: see `planted`.
    """
    code = copied(folder)
    try:
        planted(fault, code)
        found = pytest_of(fault.tests, Place(fault.environment, fault.ranks), code)
    finally:
        shutil.rmtree(code)
    failed = found.failed(fault.tests)
    # The ranks beside the one that failed may have passed already; none may have failed to run.
    if 1 not in found.status or not found.status <= {0, 1} or not failed:
        raise Survived(
            f"{fault.name}: expected one of {', '.join(fault.tests)} to fail, pytest ended with "
            f"{sorted(found.status)}: {found.output}"
        )
    return failed[0]


def check_without(tests: Iterable[str], place: Place, folder: Path) -> None:
    """The tests pass where there is no fault, each of the named ones.

    Raises:
        Survived: one fails, is skipped or does not exist.
    """
    tests = tuple(tests)
    code = copied(folder)
    try:
        found = pytest_of(tests, place, code)
    finally:
        shutil.rmtree(code)
    passed = {test for test, outcomes in found.tests.items() if outcomes == {"passed"}}
    missing = [name for name in tests if not any(belongs(test, [name]) for test in passed)]
    if found.status != {0} or missing:
        raise Survived(
            f"without any fault pytest ended with {sorted(found.status)}, and nothing passed of "
            f"{', '.join(missing) or 'no test'}: {found.output}"
        )
