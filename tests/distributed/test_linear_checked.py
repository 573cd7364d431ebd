"""Checked calls of the linear loss: a fault of one rank, or a disagreement, raises on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

from te_ce import linear_cross_entropy
from tests.support.linear_ranks import draw, shard_of, widths_of
from tests.support.subject import Subject


@pytest.mark.parametrize("fault", ["bad_target", "sequence_parallel", "requires_grad", "shape"])
def test_checked_calls_raise_on_every_rank(subject: Subject, tp_group: ProcessGroup, fault: str) -> None:
    ranks, rank = tp_group.size(), dist.get_rank(tp_group)
    drawn, shard = draw(ranks, subject.device), shard_of(widths_of("even", ranks), rank)
    hidden, target, is_odd = drawn.hidden.clone().requires_grad_(), drawn.target.clone(), rank == ranks - 1
    keywords: dict[str, Any] = {}
    expected: tuple[type[Exception], str]
    if fault == "bad_target":
        target[1, 0] = 77 if is_odd else target[1, 0]
        expected = IndexError, f"rank {ranks - 1} has 1 bad row.*row 2 with target 77"
    elif fault == "requires_grad":
        hidden.requires_grad_(not is_odd)
        expected = ValueError, "hidden.requires_grad: expected the same on every rank"
    elif fault == "sequence_parallel":
        if is_odd:
            hidden, keywords = drawn.hidden.chunk(ranks)[rank].clone().requires_grad_(), {"sequence_parallel": True}
        expected = ValueError, "hidden.shape: expected the same on every rank"
    else:
        hidden = hidden[..., :-1] if is_odd else hidden
        expected = (ValueError, "weight: expected shape") if is_odd else (RuntimeError, "rank .* raised ValueError")
    weight = drawn.weight[shard.start : shard.stop].clone().requires_grad_()
    with subject.serving(), pytest.raises(expected[0], match=expected[1]):
        linear_cross_entropy(hidden, weight, target, group=tp_group, shard=shard, check_targets=True, **keywords)
