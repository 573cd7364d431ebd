"""Subjects for the loss tests, and the switch that makes a run fail when a subject was not really tested."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from te_ce import backend as backends
from tests.support.subject import Subject

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _subjects() -> list[str]:
    if _INTERPRETED:
        return ["torch-cpu", "triton-interpreter"]
    if torch.cuda.is_available():
        return ["torch-cuda", "triton-cuda"]
    return ["torch-cpu"]


def make_subject(name: str) -> Subject:
    """The subject of that name; a Triton one compiles or interprets the real kernels."""
    implementation, _, where = name.partition("-")
    device = torch.device("cuda", torch.cuda.current_device()) if where == "cuda" else torch.device("cpu")
    if implementation == "torch":
        return Subject(name, backends._torch_backend(), device)
    ulps = {torch.bfloat16: 1.0} if where == "interpreter" else {}
    return Subject(name, backends._triton_backend(), device, ulps)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--must-pass-on",
        action="append",
        default=[],
        metavar="SUBJECT",
        help="fail the run unless at least one test passed on this subject and none of its tests was skipped",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        metafunc.parametrize("subject", _subjects(), indirect=True)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """One implementation on one device; a test that takes it runs on all that this process can serve."""
    return make_subject(request.param)


@pytest.fixture
def twin() -> Subject:
    """The plain-torch twin, for tests of what the tests themselves accept."""
    return make_subject("torch-cpu")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty is filled with NaN, so an output that was never written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class _Tally:
    """Outcomes of the tests of each subject, read off the test ids, so that it also works under xdist."""

    def __init__(self, required: list[str]) -> None:
        self.required = required
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome == "skipped":
            for name in self.required:
                if name in report.nodeid:
                    self.outcomes[name, report.outcome] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for name in self.required:
            passed, skipped = self.outcomes[name, "passed"], self.outcomes[name, "skipped"]
            if not passed or skipped:
                print(f"\nERROR: {name}: {passed} passed, {skipped} skipped; it must pass and may not be skipped")
                session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish(session: pytest.Session) -> None:
    # What exists by now stays; a collection (see `Subject.loss`) need not look through it again.
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    required = config.getoption("--must-pass-on")
    if required and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Tally(required))
