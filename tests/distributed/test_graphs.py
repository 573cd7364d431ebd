"""CUDA graphs that hold a collective: replayed over ranks with other logits, targets and numbers of ignored rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce import VocabShard, vocab_parallel_cross_entropy
from te_ce.outputs import OUTPUTS
from tests.support.graphs import captured, new_inputs

_ROWS = 64


@pytest.mark.parametrize("classes", [1000, 50_257, 128_256])
@pytest.mark.parametrize("outputs", [(), OUTPUTS], ids=["loss", "all"])
def test_replayed_over_ranks(tp_group: ProcessGroup, classes: int, outputs: tuple[str, ...]) -> None:
    shard = VocabShard.even(classes, tp_group)
    whole = torch.empty(_ROWS, classes, dtype=torch.bfloat16, device="cuda")
    logits = torch.empty(_ROWS, shard.width, dtype=torch.bfloat16, device="cuda")
    target, g = torch.empty(_ROWS, dtype=torch.int64, device="cuda"), torch.empty(_ROWS, device="cuda")

    def fill(ignored: int, seed: int) -> None:
        new_inputs(whole, target, g, classes, ignored, seed)
        logits.copy_(whole[:, shard.start : shard.stop])

    def loss_of(x: Tensor, place: dict[str, Any]) -> tuple[Tensor, ...]:
        out = vocab_parallel_cross_entropy(x, target, outputs=outputs, label_smoothing=0.1, **place)
        values = (out,) if isinstance(out, Tensor) else tuple(out)
        differentiable = values[:4]
        (grad,) = torch.autograd.grad(differentiable, x, [g * (number + 1) for number in range(len(differentiable))])
        return grad, *(value.detach() for value in values)

    fill(3, 0)
    logits.requires_grad_()
    graph, replayed = captured(lambda: loss_of(logits, {"group": tp_group, "shard": shard}))
    for seed, ignored in ((1, 0), (2, 40), (3, _ROWS), (4, 1)):
        with torch.no_grad():
            fill(ignored, seed)
        for value in replayed:
            value.fill_(-1)
        graph.replay()
        for value, expected in zip(replayed, loss_of(logits, {"group": tp_group, "shard": shard}), strict=True):
            assert torch.equal(value, expected)
        # What one rank with the whole vocabulary computes, but for the order of its sums.
        alone = loss_of(whole.detach().requires_grad_(), {})
        torch.testing.assert_close(replayed[1], alone[1], rtol=1e-5, atol=1e-5)
        assert (replayed[0][:ignored] == 0).all()
    dist.barrier(tp_group)
