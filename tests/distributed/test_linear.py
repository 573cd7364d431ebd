"""The linear loss over real ranks, against one float64 reference of the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode

from te_ce import LossOptions, linear_cross_entropy
from tests.support.dense import dense_values
from tests.support.linear_ranks import (
    COLUMNS,
    PLAIN,
    RICH,
    check_close,
    check_ranks,
    draw,
    of_all_ranks,
    run_rank,
    shard_of,
    widths_of,
)
from tests.support.subject import Subject

_CASES = [
    # layout, options, sequence_parallel, keep
    ("even", PLAIN, False, "recompute"),
    ("even", PLAIN, True, "recompute"),
    ("uneven", PLAIN, False, 1.0),
    ("uneven", RICH, True, 0.5),
    ("uneven", RICH, False, "recompute"),
    ("even", RICH, True, 1.0),
]


@pytest.mark.parametrize(("layout", "options", "sequence_parallel", "keep"), _CASES)
def test_ranks_match_float64(
    subject: Subject,
    tp_group: ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    options: LossOptions,
    sequence_parallel: bool,
    keep: Any,
) -> None:
    # Ragged, and another width on every rank, so that ranks have different numbers of chunks.
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", str(9 + 4 * dist.get_rank(tp_group)))
    drawn = draw(tp_group.size(), subject.device)
    widths = widths_of(layout, tp_group.size())
    result = run_rank(subject, drawn, widths, tp_group, options, sequence_parallel, keep=keep)
    check_ranks(of_all_ranks(result, tp_group), drawn, options, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_token_weights_match_float64(
    subject: Subject,
    tp_group: ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    reduction: str,
    sequence_parallel: bool,
) -> None:
    monkeypatch.setenv("TE_CE_CHUNK_TOKENS", "3")
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", str(9 + 4 * dist.get_rank(tp_group)))
    ranks, rank = tp_group.size(), dist.get_rank(tp_group)
    drawn, widths = draw(ranks, subject.device), widths_of("uneven", ranks)
    shard = shard_of(widths, rank)
    token_weights = torch.rand(drawn.target.shape, generator=torch.Generator().manual_seed(3)).to(subject.device)
    hidden = (drawn.hidden.chunk(ranks)[rank] if sequence_parallel else drawn.hidden).clone().requires_grad_()
    weight = drawn.weight[shard.start : shard.stop].clone().requires_grad_()
    with subject.serving():
        loss = linear_cross_entropy(
            hidden,
            weight,
            drawn.target,
            token_weights=token_weights,
            sequence_parallel=sequence_parallel,
            group=tp_group,
            shard=shard,
            reduction=reduction,
        )
    (loss * 3).backward()
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (loss.detach().cpu(), hidden.grad.cpu(), weight.grad.cpu()), group=tp_group)

    h, w = (x.detach().cpu().double().requires_grad_() for x in drawn[:2])
    values = dense_values(h @ w.t(), drawn.target.cpu(), PLAIN)["loss"] * token_weights.cpu().double().view(-1)
    truth = values.sum() / (1 if reduction == "sum" else (drawn.target != -100).sum().cpu())
    (truth * 3).backward()
    for each in gathered:
        check_close("loss", each[0], truth.detach())
        assert torch.equal(each[0], gathered[0][0])
    check_close("hidden", torch.cat([each[1] for each in gathered]) if sequence_parallel else gathered[-1][1], h.grad)
    check_close("weight", torch.cat([each[2] for each in gathered]), w.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "nothing"])
def test_collectives(
    subject: Subject, tp_group: ProcessGroup, monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool, frozen: str
) -> None:
    """One of the statistics however many chunks; one sum of hidden's gradient; the sequence gathered both ways."""
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", "9")
    ranks, rank = tp_group.size(), dist.get_rank(tp_group)
    drawn, shard = draw(ranks, subject.device), shard_of(widths_of("even", ranks), rank)
    hidden = (drawn.hidden.chunk(ranks)[rank] if sequence_parallel else drawn.hidden).clone()
    hidden.requires_grad_(frozen != "hidden")
    weight = drawn.weight[shard.start : shard.stop].clone().requires_grad_(frozen != "weight")
    with subject.serving(), CommDebugMode() as forward:
        loss = linear_cross_entropy(
            hidden, weight, drawn.target, group=tp_group, shard=shard, sequence_parallel=sequence_parallel
        )
    with CommDebugMode() as backward:
        loss.sum().backward()
    assert forward.get_total_counts() == 1 + sequence_parallel, forward.get_comm_counts()
    # None where hidden is frozen: ranks of which no input needs a gradient have no backward.
    expected = 0 if frozen == "hidden" else 1 + sequence_parallel
    assert backward.get_total_counts() == expected, backward.get_comm_counts()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_interleaved_subgroups(subject: Subject, tp_group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0, 2, .. and 1, 3, .. are groups of their own, at the same time, with batches of their own."""
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", "13")
    world, rank = tp_group.size(), dist.get_rank(tp_group)
    members = [list(range(first, world, 2)) for first in range(2)]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = groups[rank % 2]
    drawn = draw(mine.size(), subject.device)
    drawn = drawn._replace(hidden=drawn.hidden * (1 + rank % 2))
    for sequence_parallel in (False, True):
        result = run_rank(
            subject,
            drawn,
            widths_of("uneven", mine.size()) if mine.size() > 1 else (COLUMNS,),
            mine,
            RICH,
            sequence_parallel,
        )
        check_ranks(of_all_ranks(result, mine), drawn, RICH, sequence_parallel)


def test_a_rank_without_a_backward_leaves_nobody_waiting(subject: Subject, tp_group: ProcessGroup) -> None:
    """Frozen hidden states, and an empty shard that is no parameter: the other ranks' backward has no collective."""
    ranks, rank = tp_group.size(), dist.get_rank(tp_group)
    drawn = draw(ranks, subject.device)
    widths = (COLUMNS, *[0] * (ranks - 1))
    shard = shard_of(widths, rank)
    weight = drawn.weight[shard.start : shard.stop].clone().requires_grad_(rank == 0)
    with subject.serving():
        loss = linear_cross_entropy(
            drawn.hidden.chunk(ranks)[rank].clone(),
            weight,
            drawn.target,
            group=tp_group,
            shard=shard,
            sequence_parallel=True,
            check_targets=True,
        )
    assert loss.requires_grad == (rank == 0)
    if rank == 0:
        loss.sum().backward()
        truth = drawn.weight.detach().cpu().double().requires_grad_()
        dense_values(drawn.hidden.cpu().double() @ truth.t(), drawn.target.cpu(), PLAIN)["loss"].sum().backward()
        check_close("weight", weight.grad.cpu(), truth.grad)
