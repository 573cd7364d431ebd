"""A pytest plugin that writes down every outcome, into the folder $TE_CE_MUTATION: one file a process.

Of a test "passed", "failed", or what kept it from running: "error" of a fixture or of a file that does not import,
"skipped". A rank that its launcher ends writes nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

FOLDER = "TE_CE_MUTATION"
_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The first of setup, call and teardown that is no success."""
    if report.failed:
        outcome = "failed" if report.when == "call" else "error"
    elif report.skipped:
        outcome = "skipped"
    else:
        outcome = "passed"
    if _outcomes.get(report.nodeid, "passed") == "passed":
        _outcomes[report.nodeid] = outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that does not import."""
    if report.failed:
        _outcomes[report.nodeid] = "error"


def pytest_sessionfinish(exitstatus: int) -> None:
    """Write them down."""
    name = f"{os.environ.get('RANK', 'single')}-{os.getpid()}.json"
    text = json.dumps({"status": int(exitstatus), "outcomes": _outcomes})
    (Path(os.environ[FOLDER]) / name).write_text(text)
