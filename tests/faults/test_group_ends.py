"""What is left of a process group that was destroyed: nothing of te_ce's holds it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from te_ce import linear_cross_entropy, vocab_parallel_cross_entropy


@pytest.mark.parametrize("check_targets", [False, True], ids=["unchecked", "checked"])
def test_a_destroyed_group_is_let_go(check_targets: bool) -> None:
    """Else its connections and threads stay."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        logits, target = torch.randn(4, 8, requires_grad=True), torch.arange(4)
        for _ in range(2):
            vocab_parallel_cross_entropy(logits, target, group=group, check_targets=check_targets).sum().backward()
            weight = torch.randn(8, 8)
            linear_cross_entropy(logits, weight, target, group=group, check_targets=check_targets).sum().backward()
        held = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert held() is None
    finally:
        dist.destroy_process_group()
