"""The tests of one release, in fresh processes that find it first on their path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.releases import rows
from tests.releases.wheels import CHECKOUT, RELEASE
from tests.support.outcomes import FOLDER, VERSION

_PYTEST = ["-m", "pytest", "-q", "-p", "tests.support.outcomes", "-p", "no:cacheprovider"]
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Cell(NamedTuple):
    """A row in a release: "yes", "no" or "-", and the tests that failed or the reasons of those that were skipped."""

    verdict: str
    notes: tuple[str, ...]


class Unusable(Exception):
    """The run says nothing about the release."""


def check(version: str, folder: Path) -> dict[str, Cell]:
    """Every row of the matrix in the release that is unpacked in `folder`.

    Raises:
        Unusable: another release was loaded, or a row had no test at all.
    """
    outcomes: dict[str, set[str]] = {}
    for command in _commands():
        for found in _outcomes(command, folder):
            if found["version"].partition("+")[0] != version.partition("+")[0]:
                raise Unusable(f"expected megatron-core {version} to be loaded, found {found['version']}")
            for node, outcome in found["outcomes"].items():
                outcomes.setdefault(node, set()).add(outcome)
    return judge(outcomes)


def judge(outcomes: dict[str, set[str]]) -> dict[str, Cell]:
    """The rows, from the outcomes of every test on every rank.

    Raises:
        Unusable: a row had no test.
    """
    cells = {}
    for row in rows.ROWS:
        own = {node: found for node, found in outcomes.items() if row in rows.of(node)}
        if not own:
            raise Unusable(f"{row}: expected tests, found none; they may have moved")
        failed = [node for node, found in own.items() if found & {"failed", "error"}]
        passed = [node for node, found in own.items() if found == {"passed"}]
        reasons = {each.removeprefix("skipped: ") for found in own.values() for each in found if each != "passed"}
        if failed:
            cells[row] = Cell("no", tuple(sorted(failed)))
        elif passed:
            cells[row] = Cell("yes", ())
        else:
            cells[row] = Cell("-", tuple(sorted(reasons)))
    # A file that does not import fails whatever row it belongs to, or none.
    lost = [node for node, found in outcomes.items() if "error" in found and "::" not in node]
    if lost:
        raise Unusable(f"could not be collected: {', '.join(lost)}")
    return cells


def _commands() -> Iterable[list[str]]:
    yield [*_PYTEST, "-n", "auto", *rows.files("tests/megatron")]
    yield [*_TORCHRUN, *_PYTEST, *rows.files("tests/distributed")]
    if training := rows.files("tests/training"):
        yield [*_PYTEST, "-n", "auto", *training]


def _outcomes(command: list[str], folder: Path) -> list[dict[str, object]]:
    """What every process of a command wrote down; its output is shown where one wrote nothing."""
    with tempfile.TemporaryDirectory() as temporary:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(CHECKOUT)]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # 0.15 compiles for the GPUs that it finds, while it is imported, and does not expect to find none.
            "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0"),
            FOLDER: temporary,
            VERSION: "megatron.core",
            RELEASE: str(folder),
        }
        done = subprocess.run([sys.executable, *command], cwd=CHECKOUT, env=environment, capture_output=True, text=True)
        files = sorted(Path(temporary).iterdir())
        if len(files) != (2 if "torch.distributed.run" in command else 1) or done.returncode > 1:
            raise Unusable(f"{' '.join(command)}: {done.stdout[-3000:]} {done.stderr[-2000:]}")
        return [json.loads(file.read_text()) for file in files]
