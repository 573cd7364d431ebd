"""The linear loss over real ranks, against one float64 reference of the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode

from te_ce import LossOptions, VocabShard, linear_cross_entropy
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.dense import dense_values
from tests.support.subject import Subject

_HIDDEN, _COLUMNS = 6, 48
# Relative to the largest element: float32 GEMMs over 48 columns or 24 rows.
_TOLERANCE = 5e-6

_PLAIN = LossOptions()
_RICH = LossOptions(label_smoothing=0.1, z_loss_weight=0.01, softcap=9.0, scale=0.8, vocab_size=41)


class Drawn(NamedTuple):
    """The whole layer and batch, the same on every rank: hidden [s, b, H], weight [V, H], bias [V], target [s, b]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    target: Tensor
    grads: OutputGrads


def _draw(ranks: int, device: torch.device) -> Drawn:
    random = torch.Generator().manual_seed(5)
    shape = (ranks, 2)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).to(device)

    target = torch.randint(41, shape, generator=random)
    target.view(-1)[3] = -100
    grads = OutputGrads(*(normal(*shape) for _ in OutputGrads._fields))
    return Drawn(normal(*shape, _HIDDEN), normal(_COLUMNS, _HIDDEN), normal(_COLUMNS), target.to(device), grads)


def _widths(layout: str, ranks: int) -> tuple[int, ...]:
    if layout == "even":
        return (_COLUMNS // ranks,) * ranks
    # The second rank of three or more has nothing.
    first = 29
    rest = [0] * (ranks > 2) + [11] * (ranks > 3)
    return (first, *rest, _COLUMNS - first - sum(rest))


class _Result(NamedTuple):
    values: dict[str, Tensor]
    hidden: Tensor
    weight: Tensor
    bias: Tensor


def _shard(widths: Sequence[int], rank: int) -> VocabShard:
    start = sum(widths[:rank])
    return VocabShard(start, start + widths[rank], sum(widths))


def _run(
    subject: Subject,
    drawn: Drawn,
    widths: Sequence[int],
    group: ProcessGroup,
    options: LossOptions,
    sequence_parallel: bool = False,
    **keywords: Any,
) -> _Result:
    """This rank's part of the loss with all outputs, and of the gradients."""
    rank, ranks = dist.get_rank(group), group.size()
    shard = _shard(widths, rank)
    mine = slice(shard.start, shard.stop)
    hidden = drawn.hidden.chunk(ranks)[rank] if sequence_parallel else drawn.hidden
    hidden = hidden.clone().requires_grad_()
    weight, bias = drawn.weight[mine].clone().requires_grad_(), drawn.bias[mine].clone().requires_grad_()
    with subject.serving():
        values = linear_cross_entropy(
            hidden,
            weight,
            drawn.target,
            bias=bias,
            group=group,
            shard=shard,
            outputs=OUTPUTS,
            options=options,
            sequence_parallel=sequence_parallel,
            **keywords,
        )
    torch.autograd.backward([getattr(values, name) for name in OutputGrads._fields], list(drawn.grads))
    assert hidden.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return _Result(
        {name: value.detach() for name, value in values._asdict().items()}, hidden.grad, weight.grad, bias.grad
    )


def _dense(drawn: Drawn, options: LossOptions) -> _Result:
    hidden, weight, bias = (x.detach().cpu().double().requires_grad_() for x in drawn[:3])
    values = dense_values(hidden @ weight.t() + bias, drawn.target.cpu(), options)
    names = OutputGrads._fields
    upstream = [g.cpu().double().reshape(-1) for g in drawn.grads if g is not None]
    grads = torch.autograd.grad([values[name] for name in names], [hidden, weight, bias], upstream)
    return _Result({name: value.detach() for name, value in values.items()}, *grads)


def _of_all_ranks(result: _Result, group: ProcessGroup) -> list[_Result]:
    mine = ({name: value.cpu() for name, value in result.values.items()}, *(grad.cpu() for grad in result[1:]))
    gathered: list[Any] = [None] * group.size()
    # Before any check, so that a rank that fails leaves no other rank waiting.
    dist.all_gather_object(gathered, mine, group=group)
    return [_Result(*each) for each in gathered]


def _check(results: Sequence[_Result], drawn: Drawn, options: LossOptions, sequence_parallel: bool) -> None:
    truth = _dense(drawn, options)
    for name, value in truth.values.items():
        for result in results:
            _close(name, result.values[name], value.view(drawn.target.shape))
            assert torch.equal(result.values[name], results[0].values[name]), f"{name}: ranks disagree"
    for result in results:
        assert torch.equal(result.values["predictions"], results[0].values["predictions"])
    if sequence_parallel:
        _close("hidden", torch.cat([result.hidden for result in results]), truth.hidden)
    else:
        for result in results:
            _close("hidden", result.hidden, truth.hidden)
            assert torch.equal(result.hidden, results[0].hidden), "hidden: ranks disagree"
    _close("weight", torch.cat([result.weight for result in results]), truth.weight)
    _close("bias", torch.cat([result.bias for result in results]), truth.bias)


def _close(name: str, got: Tensor, truth: Tensor) -> None:
    assert got.shape == truth.shape, name
    error = (got.double() - truth).abs().max()
    assert error <= _TOLERANCE * truth.abs().max(), f"{name}: off by {error:.3g} of {truth.abs().max():.3g}"


_CASES = [
    # layout, options, sequence_parallel, keep
    ("even", _PLAIN, False, "recompute"),
    ("even", _PLAIN, True, "recompute"),
    ("uneven", _PLAIN, False, 1.0),
    ("uneven", _RICH, True, 0.5),
    ("uneven", _RICH, False, "recompute"),
    ("even", _RICH, True, 1.0),
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
    drawn = _draw(tp_group.size(), subject.device)
    widths = _widths(layout, tp_group.size())
    result = _run(subject, drawn, widths, tp_group, options, sequence_parallel, keep=keep)
    _check(_of_all_ranks(result, tp_group), drawn, options, sequence_parallel)


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
    drawn, widths = _draw(ranks, subject.device), _widths("uneven", ranks)
    shard = _shard(widths, rank)
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
    values = dense_values(h @ w.t(), drawn.target.cpu(), _PLAIN)["loss"] * token_weights.cpu().double().view(-1)
    truth = values.sum() / (1 if reduction == "sum" else (drawn.target != -100).sum().cpu())
    (truth * 3).backward()
    for each in gathered:
        _close("loss", each[0], truth.detach())
        assert torch.equal(each[0], gathered[0][0])
    _close("hidden", torch.cat([each[1] for each in gathered]) if sequence_parallel else gathered[-1][1], h.grad)
    _close("weight", torch.cat([each[2] for each in gathered]), w.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "nothing"])
def test_collectives(
    subject: Subject, tp_group: ProcessGroup, monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool, frozen: str
) -> None:
    """One of the statistics however many chunks; one sum of hidden's gradient; the sequence gathered both ways."""
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", "9")
    ranks, rank = tp_group.size(), dist.get_rank(tp_group)
    drawn, shard = _draw(ranks, subject.device), _shard(_widths("even", ranks), rank)
    hidden = (drawn.hidden.chunk(ranks)[rank] if sequence_parallel else drawn.hidden).clone()
    hidden.requires_grad_(frozen != "hidden")
    weight = drawn.weight[shard.start : shard.stop].clone().requires_grad_(frozen != "weight")
    with subject.serving(), CommDebugMode() as forward:
        loss = linear_cross_entropy(
            hidden, weight, drawn.target, group=tp_group, shard=shard, sequence_parallel=sequence_parallel
        )
    with CommDebugMode() as backward:
        loss.sum().backward()
    sums = 0 if frozen == "hidden" else 1
    assert forward.get_total_counts() == 1 + sequence_parallel, forward.get_comm_counts()
    assert backward.get_total_counts() == sums + sequence_parallel, backward.get_comm_counts()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_interleaved_subgroups(subject: Subject, tp_group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0, 2, .. and 1, 3, .. are groups of their own, at the same time, with batches of their own."""
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", "13")
    world, rank = tp_group.size(), dist.get_rank(tp_group)
    members = [list(range(first, world, 2)) for first in range(2)]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = groups[rank % 2]
    drawn = _draw(mine.size(), subject.device)
    drawn = drawn._replace(hidden=drawn.hidden * (1 + rank % 2))
    for sequence_parallel in (False, True):
        result = _run(
            subject,
            drawn,
            _widths("uneven", mine.size()) if mine.size() > 1 else (_COLUMNS,),
            mine,
            _RICH,
            sequence_parallel,
        )
        _check(_of_all_ranks(result, mine), drawn, _RICH, sequence_parallel)
