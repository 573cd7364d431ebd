"""Transformer Engine's interface over real ranks: loss of the whole vocabulary, gradient of this rank's shard."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from te_ce.transformer_engine import parallel_cross_entropy
from tests.support.subject import Subject

B, S, COLUMNS = 2, 5, 24  # COLUMNS of every rank


@pytest.mark.parametrize(
    ("alpha", "reduce", "overwrite"),
    [(0.0, False, False), (0.1, False, False), (1.0, False, False), (0.0, True, False), (0.1, True, True)],
)
def test_ranks(subject: Subject, tp_group: ProcessGroup, alpha: float, reduce: bool, overwrite: bool) -> None:
    rank, size = dist.get_rank(tp_group), dist.get_world_size(tp_group)
    random = torch.Generator().manual_seed(5)
    whole = torch.randn(B, S, COLUMNS * size, generator=random, dtype=torch.float64).float() * 3
    target = torch.randint(COLUMNS * size, (B, S), generator=random)
    target[1, 0] = -100
    g = torch.randn(1 if reduce else (B, S), generator=random)
    mine = slice(rank * COLUMNS, (rank + 1) * COLUMNS)
    logits = whole[..., mine].contiguous().to(subject.device).requires_grad_()
    with subject.serving():
        loss = parallel_cross_entropy(
            logits, target.to(subject.device), alpha, reduce, tp_group, overwrite_input=overwrite
        )
    (grad,) = torch.autograd.grad(loss, logits, g.to(subject.device))
    losses: list[torch.Tensor | None] = [None] * size
    dist.all_gather_object(losses, loss.detach().cpu(), group=tp_group)

    x = whole.double().requires_grad_()
    truth = F.cross_entropy(
        x.flatten(0, 1), target.flatten(), label_smoothing=alpha, reduction="mean" if reduce else "none"
    )
    (truth_grad,) = torch.autograd.grad(truth, x, g.double().reshape(truth.shape))
    torch.testing.assert_close(loss.double().cpu(), truth.view(loss.shape), rtol=4e-7, atol=4e-7)
    torch.testing.assert_close(grad.double().cpu(), truth_grad[..., mine], rtol=0, atol=1e-6)
    assert all(torch.equal(each, losses[0]) for each in losses), "ranks disagree"  # type: ignore[arg-type]
