"""A pytest plugin that writes down every outcome: `-p tests.releases.record`, into the folder $TE_CE_OUTCOMES.

One file a process, `NAME.json`: the version of megatron-core that was imported, and for every test "passed", "failed",
or "skipped: " and why.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

FOLDER = "TE_CE_OUTCOMES"
_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of setup, call and teardown."""
    before = _outcomes.get(report.nodeid)
    if report.failed:
        _outcomes[report.nodeid] = "failed"
    elif report.skipped and before != "failed":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _outcomes[report.nodeid] = f"skipped: {reason.removeprefix('Skipped: ')}"
    elif report.when == "call" and before is None:
        _outcomes[report.nodeid] = "passed"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that does not import is a failure of everything in it."""
    if report.failed:
        _outcomes[report.nodeid] = "failed"


def pytest_sessionfinish(session: Any) -> None:
    """With several workers, the process that started them has all outcomes; the workers write nothing."""
    if hasattr(session.config, "workerinput") or FOLDER not in os.environ:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says what else could be installed
        import megatron.core

    name = f"{os.environ.get('RANK', 'single')}-{os.getpid()}.json"
    text = json.dumps({"version": str(megatron.core.__version__), "outcomes": _outcomes})
    (Path(os.environ[FOLDER]) / name).write_text(text)
