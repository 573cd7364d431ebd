"""A DeviceMesh of one dimension as the group; run as the other per-rank tests are, on two ranks or more."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from te_ce import VocabShard, vocab_parallel_cross_entropy
from tests.support.subject import Subject


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_mesh_of_one_dimension_is_a_group(subject: Subject, tp_group: ProcessGroup, compiled: bool) -> None:
    mesh = DeviceMesh.from_group(tp_group, subject.device.type, mesh_dim_names=("tp",))
    rank = dist.get_rank(tp_group)
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).to(subject.device)
    target = torch.tensor([0, 5, -100, 3], device=subject.device)

    def step(logits: Tensor, group: ProcessGroup | DeviceMesh) -> Tensor:
        return vocab_parallel_cross_entropy(logits, target, group=group)

    torch._dynamo.reset()
    function = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    assert torch.equal(function(logits, mesh), step(logits, tp_group))
    assert VocabShard.even(7, mesh) == VocabShard.even(7, tp_group)


def test_meshes_that_are_no_group(subject: Subject, tp_group: ProcessGroup) -> None:
    ranks = torch.arange(tp_group.size())
    arguments: dict[str, Any] = {
        "logits": torch.zeros(2, 3, 4, device=subject.device),
        "target": torch.tensor([[0, 1, 2], [-100, 4, 5]], device=subject.device),
    }
    for shape, names in (((1, -1), ("dp", "tp")), ((-1, 1), ("dp", "tp"))):
        arguments["group"] = mesh = DeviceMesh(subject.device.type, ranks.view(shape), mesh_dim_names=names)
        sizes = re.escape(str(tuple(ranks.view(shape).shape)))
        expected = rf"""group: expected a 1-D .* dimensions \('dp', 'tp'\) of sizes {sizes}; .* mesh\["tp"\]"""
        with pytest.raises(ValueError, match=expected):
            subject.loss(**arguments)
        with pytest.raises(ValueError, match=expected):
            VocabShard.even(9, mesh)
    sub = DeviceMesh(subject.device.type, ranks.view(1, -1), mesh_dim_names=("dp", "tp"))["tp"]
    assert torch.equal(
        subject.loss(**arguments | {"group": sub}),
        subject.loss(**arguments | {"group": tp_group}),
    )
    arguments["group"] = DeviceMesh(subject.device.type, ranks[:-1])
    if dist.get_rank(tp_group) == tp_group.size() - 1:
        with pytest.raises(ValueError, match="group: expected a group that this rank is in"):
            subject.loss(**arguments)
