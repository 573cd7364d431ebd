"""These tests compile; under Triton's interpreter there is nothing to compile, and that is a failure, not a skip."""

from __future__ import annotations

import pytest

from te_ce.environment import interpreter_requested


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled() -> None:
    if interpreter_requested():
        pytest.fail(
            "tests/compiled: expected TRITON_INTERPRET unset, found it on; run these tests in a process of their own, "
            "without it",
            pytrace=False,
        )
