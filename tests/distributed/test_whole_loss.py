"""The whole loss over real ranks: every case, one collective, and the same bits for any number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode

from te_ce import LossOptions, VocabParallelCrossEntropyLoss, VocabShard, vocab_parallel_log_probs
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.bits import same_bits
from tests.support.broken_whole import BROKEN_WHOLE
from tests.support.subject import Subject
from tests.support.whole import WHOLE_CASES, Drawn, Result, WholeCase, case_named, check_whole

_BLOCK = 4096
_VOCABULARY = 131072


def _backward(values: Any, grads: OutputGrads, leaf: Tensor) -> Result:
    torch.autograd.backward([getattr(values, name) for name in OutputGrads._fields], list(grads))
    assert leaf.grad is not None
    return Result({name: value.detach() for name, value in values._asdict().items()}, leaf.grad)


def _run(subject: Subject, drawn: Drawn, widths: Sequence[int] | None, group: ProcessGroup) -> Result:
    """This rank's part; widths None: equal shards, not declared."""
    logits, target, options, grads = drawn
    columns, rank = logits.shape[-1], dist.get_rank(group)
    cut = [columns // group.size()] * group.size() if widths is None else widths
    start = sum(cut[:rank])
    shard = None if widths is None else VocabShard(start, start + cut[rank], columns)
    leaf = logits[..., start : start + cut[rank]].clone().requires_grad_()
    values = subject.loss(leaf, target, group=group, options=options, shard=shard, outputs=OUTPUTS)
    return _backward(values, grads, leaf)


def _of_all_ranks(result: Result, group: ProcessGroup) -> list[Result]:
    mine = ({name: value.cpu() for name, value in result.values.items()}, result.grad.cpu())
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, mine, group=group)
    return [Result(*each) for each in gathered]


def _on_host(drawn: Drawn) -> Drawn:
    options = drawn.options
    if drawn.row_scale is not None:
        options = dataclasses.replace(options, scale=drawn.row_scale.cpu())
    grads = OutputGrads(*(None if grad is None else grad.cpu() for grad in drawn.grads))
    return Drawn(drawn.logits.cpu(), drawn.target.cpu(), options, grads)


def _check_case(subject: Subject, case: WholeCase, group: ProcessGroup) -> None:
    drawn = case.draw(subject.device)
    # Gather before any check, so that a rank that fails leaves no other rank waiting.
    results = _of_all_ranks(_run(subject, drawn, case.widths(group.size()), group), group)
    check_whole(subject, _on_host(drawn), results)
    for result in results:
        for name, value in result.values.items():
            assert torch.equal(value.nan_to_num(7.5), results[0].values[name].nan_to_num(7.5)), (
                f"{name}: ranks disagree"
            )


@pytest.mark.parametrize("case", WHOLE_CASES, ids=str)
def test_ranks_match_float64(subject: Subject, tp_group: ProcessGroup, case: WholeCase) -> None:
    _check_case(subject, case, tp_group)


@pytest.mark.parametrize("broken", BROKEN_WHOLE)
def test_a_broken_loss_is_refused(subject: Subject, tp_group: ProcessGroup, broken: str) -> None:
    wrong = dataclasses.replace(subject, backend=BROKEN_WHOLE[broken][0](subject.backend))
    refused = False
    try:
        _check_case(wrong, case_named("all_fp16_row_scale"), tp_group)
    except AssertionError:
        refused = True
    refusals: list[bool | None] = [None] * tp_group.size()
    dist.all_gather_object(refusals, refused, group=tp_group)
    assert all(refusals)


@pytest.mark.parametrize("name", ["plain", "all", "row_scale_masked_padded"])
def test_one_collective_forward_and_none_backward(subject: Subject, tp_group: ProcessGroup, name: str) -> None:
    drawn = case_named(name).draw(subject.device)
    options = drawn.options
    leaf = drawn.logits.clone().requires_grad_()
    with CommDebugMode() as forward:
        values = subject.loss(leaf, drawn.target, group=tp_group, options=options, outputs=OUTPUTS)
    with CommDebugMode() as backward:
        _backward(values, drawn.grads, leaf)
    assert forward.get_total_counts() == 1, forward.get_comm_counts()
    assert backward.get_total_counts() == 0, backward.get_comm_counts()


def test_log_probs_and_module_over_ranks(subject: Subject, tp_group: ProcessGroup) -> None:
    case = case_named("scale_softcap")
    drawn, widths = case.draw(subject.device), case.widths(tp_group.size())
    start = sum(widths[: dist.get_rank(tp_group)])
    shard = VocabShard(start, start + widths[dist.get_rank(tp_group)], sum(widths))
    mine = drawn.logits[..., shard.start : shard.stop].contiguous()
    place: dict[str, Any] = {"group": tp_group, "shard": shard, "options": drawn.options}
    expected = subject.loss(mine, drawn.target, outputs=OUTPUTS, **place)
    with subject.serving():
        log_probs, entropy = vocab_parallel_log_probs(mine, drawn.target, entropy=True, **place)
        alone = vocab_parallel_log_probs(mine, drawn.target, **place)
        module = VocabParallelCrossEntropyLoss(outputs=OUTPUTS, **place)
        of_module = module(mine, drawn.target)
    assert torch.equal(log_probs, expected.log_probs)
    assert torch.equal(alone, expected.log_probs)
    assert torch.equal(entropy, expected.entropy)
    assert all(torch.equal(a, b) for a, b in zip(of_module, expected, strict=True))
    assert f"ranks={tp_group.size()}, shard={shard}" in module.extra_repr()


_REPRODUCIBLE = [
    WholeCase("plain", LossOptions(reproducible_tp=True), rows=(2,), columns=_VOCABULARY, dtype=torch.bfloat16),
    WholeCase(
        "all",
        LossOptions(
            reproducible_tp=True, z_loss_weight=0.01, softcap=20.0, label_smoothing=0.1, vocab_size=_VOCABULARY - 815
        ),
        rows=(2,),
        columns=_VOCABULARY,
        has_row_scale=True,
    ),
]


@pytest.mark.parametrize("layout", ["even", "uneven"])
@pytest.mark.parametrize("case", _REPRODUCIBLE, ids=str)
def test_the_bits_of_one_rank(subject: Subject, tp_group: ProcessGroup, case: WholeCase, layout: str) -> None:
    ranks, blocks = tp_group.size(), _VOCABULARY // _BLOCK
    drawn = case.draw(subject.device)
    leaf = drawn.logits.clone().requires_grad_()
    values = subject.loss(leaf, drawn.target, options=drawn.options, outputs=OUTPUTS)
    alone = _backward(values, drawn.grads, leaf)
    widths = None
    if layout == "uneven" or blocks % ranks:
        cut = [(blocks // ranks - 1 + rank) * _BLOCK for rank in range(ranks - 1)]
        widths = [*cut, _VOCABULARY - sum(cut)]
    results = _of_all_ranks(_run(subject, drawn, widths, tp_group), tp_group)
    for result in results:
        for name, value in result.values.items():
            assert same_bits(value, alone.values[name].cpu()), f"{name}: other bits than on one rank"
    assert same_bits(torch.cat([result.grad for result in results], -1), alone.grad.cpu()), "gradient: other bits"


def test_shards_that_end_inside_a_block_are_refused_on_every_rank(subject: Subject, tp_group: ProcessGroup) -> None:
    logits = torch.zeros(2, 100, device=subject.device)
    target = torch.zeros(2, dtype=torch.int64, device=subject.device)
    if tp_group.size() > 1:
        with pytest.raises(
            ValueError, match="reproducible_tp: expected shards that begin and end at multiples of 4096"
        ):
            subject.loss(logits, target, group=tp_group, reproducible_tp=True)
    dist.barrier(tp_group)
