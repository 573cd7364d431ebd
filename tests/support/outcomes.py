"""A pytest plugin that writes down every outcome: `-p tests.support.outcomes`, into the folder $TE_CE_OUTCOMES.

One file a process, `NAME.json`: its exit status; for every test "passed", "failed", or what kept it from running:
"error" of a fixture or of a file that does not import, "skipped: " and why; and the version of the module that
$TE_CE_OUTCOMES_VERSION names, as this process imports it. A rank that its launcher ends writes nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from pathlib import Path

import pytest

FOLDER, VERSION = "TE_CE_OUTCOMES", "TE_CE_OUTCOMES_VERSION"
_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The first of setup, call and teardown that is no success."""
    if report.failed:
        outcome = "failed" if report.when == "call" else "error"
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        outcome = f"skipped: {reason.removeprefix('Skipped: ')}"
    else:
        outcome = "passed"
    before = _outcomes.get(report.nodeid, "passed")
    # What goes wrong while a skipped or passed test is cleared away counts.
    if before == "passed" or (report.failed and before.startswith("skipped")):
        _outcomes[report.nodeid] = outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that does not import is an error of everything in it."""
    if report.failed:
        _outcomes[report.nodeid] = "error"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With several workers, the process that started them has all outcomes; the workers write nothing."""
    if hasattr(session.config, "workerinput") or FOLDER not in os.environ:
        return
    written = {"status": int(exitstatus), "outcomes": _outcomes}
    if module := os.environ.get(VERSION):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron.core says what else could be installed
            written["version"] = str(importlib.import_module(module).__version__)
    name = f"{os.environ.get('RANK', 'single')}-{os.getpid()}.json"
    (Path(os.environ[FOLDER]) / name).write_text(json.dumps(written))
