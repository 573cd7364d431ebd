"""A small layer and batch for ranks: what one rank computes of them, and the float64 truth of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce import LossOptions, VocabShard, linear_cross_entropy
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.dense import dense_values
from tests.support.subject import Subject

HIDDEN, COLUMNS = 6, 48
# Relative to the largest element: float32 GEMMs over 48 columns or 24 rows.
_TOLERANCE = 5e-6

PLAIN = LossOptions()
RICH = LossOptions(label_smoothing=0.1, z_loss_weight=0.01, softcap=9.0, scale=0.8, vocab_size=41)


class Drawn(NamedTuple):
    """The whole layer and batch, the same on every rank: hidden [s, b, H], weight [V, H], bias [V], target [s, b]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    target: Tensor
    grads: OutputGrads


def draw(ranks: int, device: torch.device) -> Drawn:
    random = torch.Generator().manual_seed(5)
    shape = (ranks, 2)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).to(device)

    target = torch.randint(41, shape, generator=random)
    target.view(-1)[1] = -100
    grads = OutputGrads(*(normal(*shape) for _ in OutputGrads._fields))
    return Drawn(normal(*shape, HIDDEN), normal(COLUMNS, HIDDEN), normal(COLUMNS), target.to(device), grads)


def widths_of(layout: str, ranks: int) -> tuple[int, ...]:
    if layout == "even":
        return (COLUMNS // ranks,) * ranks
    # The second rank of three or more has nothing.
    first = 29
    rest = [0] * (ranks > 2) + [11] * (ranks > 3)
    return (first, *rest, COLUMNS - first - sum(rest))


class LinearResult(NamedTuple):
    values: dict[str, Tensor]
    hidden: Tensor
    weight: Tensor
    bias: Tensor


def shard_of(widths: Sequence[int], rank: int) -> VocabShard:
    start = sum(widths[:rank])
    return VocabShard(start, start + widths[rank], sum(widths))


def run_rank(
    subject: Subject,
    drawn: Drawn,
    widths: Sequence[int],
    group: ProcessGroup,
    options: LossOptions,
    sequence_parallel: bool = False,
    **keywords: Any,
) -> LinearResult:
    """This rank's part of the loss with all outputs, and of the gradients."""
    rank, ranks = dist.get_rank(group), group.size()
    shard = shard_of(widths, rank)
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
    return LinearResult(
        {name: value.detach() for name, value in values._asdict().items()}, hidden.grad, weight.grad, bias.grad
    )


def dense_layer(drawn: Drawn, options: LossOptions) -> LinearResult:
    hidden, weight, bias = (x.detach().cpu().double().requires_grad_() for x in drawn[:3])
    values = dense_values(hidden @ weight.t() + bias, drawn.target.cpu(), options)
    names = OutputGrads._fields
    upstream = [g.cpu().double().reshape(-1) for g in drawn.grads if g is not None]
    grads = torch.autograd.grad([values[name] for name in names], [hidden, weight, bias], upstream)
    return LinearResult({name: value.detach() for name, value in values.items()}, *grads)


def of_all_ranks(result: LinearResult, group: ProcessGroup) -> list[LinearResult]:
    mine = ({name: value.cpu() for name, value in result.values.items()}, *(grad.cpu() for grad in result[1:]))
    gathered: list[Any] = [None] * group.size()
    # Before any check, so that a rank that fails leaves no other rank waiting.
    dist.all_gather_object(gathered, mine, group=group)
    return [LinearResult(*each) for each in gathered]


def check_ranks(results: Sequence[LinearResult], drawn: Drawn, options: LossOptions, sequence_parallel: bool) -> None:
    truth = dense_layer(drawn, options)
    for name, value in truth.values.items():
        for result in results:
            check_close(name, result.values[name], value.view(drawn.target.shape))
            assert torch.equal(result.values[name], results[0].values[name]), f"{name}: ranks disagree"
    for result in results:
        assert torch.equal(result.values["predictions"], results[0].values["predictions"])
    if sequence_parallel:
        check_close("hidden", torch.cat([result.hidden for result in results]), truth.hidden)
    else:
        for result in results:
            check_close("hidden", result.hidden, truth.hidden)
            assert torch.equal(result.hidden, results[0].hidden), "hidden: ranks disagree"
    check_close("weight", torch.cat([result.weight for result in results]), truth.weight)
    check_close("bias", torch.cat([result.bias for result in results]), truth.bias)


def check_close(name: str, got: Tensor, truth: Tensor) -> None:
    assert got.shape == truth.shape, name
    error = (got.double() - truth).abs().max()
    assert error <= _TOLERANCE * truth.abs().max(), f"{name}: off by {error:.3g} of {truth.abs().max():.3g}"
