"""A copy of the code with one fault, and what its tests say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutation.faults import Fault

CHECKOUT = Path(__file__).resolve().parents[2]
_COPIED = ("te_ce", "megatron_patch", "tests", "benchmarks", "examples", "pyproject.toml")


class Survived(Exception):
    """No test noticed, or the tests say nothing."""


def copied(folder: Path) -> Path:
    """The code, in a new folder within `folder`."""
    copy = Path(tempfile.mkdtemp(dir=folder))
    for name in _COPIED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.png", "*.csv"))
        else:
            shutil.copy(source, copy / name)
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
            f"{fault.what}: expected its text once in {fault.file}, found it {text.count(fault.old)} times"
        )
    path.write_text(text.replace(fault.old, fault.new))


def pytest_of(tests: str, ranks: int, code: Path) -> subprocess.CompletedProcess[str]:
    """Run tests in the copy, up to the first that fails; kernels in Triton's interpreter, but where they compile."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "200"]
    ours = {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TE_CE_FUZZ_SEED": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | ours
    if tests.startswith("tests/unit"):
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run([*command, tests], cwd=code, env=environment, capture_output=True, text=True, check=False)


def catch(fault: Fault, folder: Path) -> str:
    """The test that notices.

    Raises:
        Survived: none does.
    """
    code = copied(folder)
    try:
        planted(fault, code)
        done = pytest_of(fault.tests, fault.ranks, code)
        failed = re.search(r"^FAILED (\S+::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
        if done.returncode != 1 or failed is None:
            raise Survived(f"{fault.what}: {fault.tests} ended with {done.returncode}: {done.stdout[-600:]}")
        return failed[1]
    finally:
        shutil.rmtree(code)


def check_without(tests: str, ranks: int, folder: Path) -> None:
    """The tests pass where there is no fault.

    Raises:
        Survived: they do not.
    """
    code = copied(folder)
    try:
        done = pytest_of(tests, ranks, code)
        if done.returncode != 0:
            raise Survived(f"{tests} fails without any fault: {done.stdout[-600:]}")
    finally:
        shutil.rmtree(code)
