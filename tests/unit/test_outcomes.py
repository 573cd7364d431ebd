"""The plugin that writes down outcomes, which the support matrix and the mutation check go by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outcomes import FOLDER, VERSION

_TESTS = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError

@pytest.fixture
def left_broken():
    yield
    raise RuntimeError

def test_good(): pass
def test_bad(): assert 0
def test_skipped(): pytest.skip("no such thing")
def test_on_broken(broken): pass
def test_leaves_broken(left_broken): pass
def test_bad_and_leaves_broken(left_broken): assert 0
def test_skipped_and_leaves_broken(left_broken): pytest.skip("no such thing")
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_is_written(workers: str, tmp_path: Path) -> None:
    code, written = tmp_path / "code", tmp_path / "written"
    code.mkdir()
    written.mkdir()
    (code / "test_a.py").write_text(_TESTS)
    (code / "test_b.py").write_text("import no_such_module")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.outcomes", "-p", "no:cacheprovider", "-n", workers]
    ours = {"PYTHONPATH": str(Path(__file__).parents[2]), FOLDER: str(written), VERSION: "pytest"}
    command += ["--rootdir", str(code), "--continue-on-collection-errors", str(code)]
    done = subprocess.run(command, cwd=code, env=os.environ | ours, capture_output=True, text=True, check=False)
    (file,) = written.iterdir()
    found = json.loads(file.read_text())
    assert found == {
        "status": 1,
        "version": pytest.__version__,
        "outcomes": {
            "test_a.py::test_good": "passed",
            "test_a.py::test_bad": "failed",
            "test_a.py::test_skipped": "skipped: no such thing",
            "test_a.py::test_on_broken": "error",
            "test_a.py::test_leaves_broken": "error",
            "test_a.py::test_bad_and_leaves_broken": "failed",
            "test_a.py::test_skipped_and_leaves_broken": "error",
            "test_b.py": "error",
        },
    }, done.stdout
