"""A short run of what hypothesis draws, the same every time; and that it refuses what is broken.

`python -m tests.fuzz` draws others, and so does this with TE_CE_FUZZ_SEED set to another number.
"""

from __future__ import annotations

import dataclasses
import os

import pytest

from tests.fuzz.properties import PROPERTIES, explore
from tests.fuzz.tally import Tally
from tests.support.broken import BROKEN
from tests.support.subject import Subject

_EXAMPLES = {"torch-cpu": 500, "triton-interpreter": 30}
_FAULTS = ("off_target_zeroed", "doubled_reduction", "target_shifted")


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:keep")
@pytest.mark.parametrize("name", PROPERTIES)
def test_holds(subject: Subject, name: str) -> None:
    number = int(os.environ.get("TE_CE_FUZZ_SEED", "0"))
    tally = Tally()
    explore(name, subject, _EXAMPLES.get(subject.name, 500), tally, number)
    assert tally.examples >= _EXAMPLES.get(subject.name, 500) // 2  # fewer only where there are no more


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in PROPERTIES for fault in _FAULTS])
def test_a_broken_loss_is_found(twin: Subject, name: str, fault: str) -> None:
    wrong = dataclasses.replace(twin, backend=BROKEN[fault](twin.backend))
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        explore(name, wrong, 300, Tally(), number=1, shrink=False)
