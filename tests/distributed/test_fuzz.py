"""A short run of what hypothesis draws for real ranks; and that it refuses a loss that is broken."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tests.fuzz.ranks import explore
from tests.fuzz.tally import Tally
from tests.support.broken import BROKEN
from tests.support.subject import Subject


def test_holds(twin: Subject, tp_group: ProcessGroup) -> None:
    tally, examples = Tally(), 40
    explore(twin, tp_group, examples, tally)
    assert tally.examples >= examples // 2 or dist.get_rank(tp_group) > 0
    assert tally.choices or dist.get_rank(tp_group) > 0


@pytest.mark.parametrize("fault", ["doubled_reduction", "target_shifted"])
def test_a_broken_loss_is_found(twin: Subject, tp_group: ProcessGroup, fault: str) -> None:
    wrong = dataclasses.replace(twin, backend=BROKEN[fault](twin.backend))
    if dist.get_rank(tp_group) > 0:
        explore(wrong, tp_group, 30, Tally())
        return
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        explore(wrong, tp_group, 30, Tally())
