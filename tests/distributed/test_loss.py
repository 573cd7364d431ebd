"""The loss over real ranks: values, bits, collectives, groups and faults.

Run as `torchrun --nproc-per-node N -m pytest tests/distributed`; every rank runs every test.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode

from te_ce import LossOptions, VocabShard, vocab_parallel_cross_entropy
from tests.support.bounds import check_gradient, check_loss
from tests.support.broken import BROKEN
from tests.support.cases import CASES, Case
from tests.support.dense import dense
from tests.support.subject import Subject

_SMOOTHED = LossOptions(label_smoothing=0.1, smoothing="others")


def _shard(widths: Sequence[int], group: ProcessGroup | None) -> VocabShard:
    rank = 0 if group is None else dist.get_rank(group)
    start = sum(widths[:rank])
    return VocabShard(start, start + widths[rank], sum(widths))


def _gathered(part: Tensor, widths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Columns of all ranks side by side, on every rank."""
    parts: list[Tensor | None] = [None] * len(widths)
    dist.all_gather_object(parts, part.detach().cpu(), group=group)
    return torch.cat([each for each in parts if each is not None], -1)


def _check_case(subject: Subject, case: Case, widths: Sequence[int], group: ProcessGroup) -> None:
    """Loss on every rank and the gradient of all shards, within the bounds; ranks bit-identical."""
    case = dataclasses.replace(case, widths=tuple(widths))
    logits, target, g = case.draw(subject.device)
    truth = dense(logits, target, case.options, g)
    shard = _shard(widths, group)
    mine = logits[..., shard.start : shard.stop].contiguous().requires_grad_()
    loss = subject.loss(mine, target, group=group, options=case.options, shard=shard)
    assert loss.shape == target.shape
    (grad,) = torch.autograd.grad(loss, mine, g)
    # Gather before any check, so that a rank that fails leaves no other rank waiting.
    whole = _gathered(grad, widths, group)
    losses: list[Tensor | None] = [None] * len(widths)
    dist.all_gather_object(losses, loss.detach().cpu(), group=group)
    check_loss(loss, truth)
    assert all(torch.equal(each, losses[0]) for each in losses), "ranks disagree"  # type: ignore[arg-type]
    ulps = subject.allowed_ulps(case.dtype)
    check_gradient(whole, truth, logits.cpu(), target.cpu(), case.options, g.cpu(), ulps)


def _layouts(ranks: int) -> dict[str, list[int]]:
    """Equal, uneven and partly empty shards."""
    uneven = [7 + 5 * rank for rank in range(ranks)]
    empty = [0 if rank % 2 else 24 for rank in range(ranks)]
    return {"even": [24] * ranks, "uneven": uneven, "empty": empty, "one_each": [1] * ranks}


_NAMES = ["plain", "bfloat16", "float16", "int32_targets", "uniform", "others", "offset_1e4_smoothed_tp2", "wide_range"]
_GROUP_CASES = [case for case in CASES if case.name in _NAMES]


def test_every_named_case_exists() -> None:
    assert len(_GROUP_CASES) == len(_NAMES)


@pytest.mark.parametrize("layout", ["even", "uneven", "empty", "one_each"])
@pytest.mark.parametrize("case", _GROUP_CASES, ids=str)
def test_ranks_match_float64(subject: Subject, tp_group: ProcessGroup, case: Case, layout: str) -> None:
    _check_case(subject, case, _layouts(tp_group.size())[layout], tp_group)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_of_this_many_ranks(subject: Subject, tp_group: ProcessGroup, case: Case) -> None:
    widths = case.widths
    if len(widths) != tp_group.size():
        # Cut to this many shards as torch.chunk would.
        part = -(-sum(widths) // tp_group.size())
        starts = [min(rank * part, sum(widths)) for rank in range(tp_group.size() + 1)]
        widths = tuple(stop - start for start, stop in itertools.pairwise(starts))
    _check_case(subject, case, widths, tp_group)


@pytest.mark.parametrize("broken", list(BROKEN))
@pytest.mark.parametrize("name", ["plain", "others", "bfloat16"])
def test_a_broken_loss_is_refused(subject: Subject, tp_group: ProcessGroup, broken: str, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    smoothing_matters = case.options.label_smoothing > 0
    if broken == "smoothing_over_the_shard" and not smoothing_matters:
        case = dataclasses.replace(case, options=_SMOOTHED)
    wrong = dataclasses.replace(subject, backend=BROKEN[broken](subject.backend))
    widths = _layouts(tp_group.size())["uneven"]
    refused = False
    try:
        _check_case(wrong, case, widths, tp_group)
    except AssertionError:
        refused = True
    # One rank may be right by luck (its own shard is the vocabulary's mean); the test fails on some rank.
    refusals: list[bool | None] = [None] * tp_group.size()
    dist.all_gather_object(refusals, refused, group=tp_group)
    assert any(refusals)


@pytest.mark.parametrize(
    ("smoothing", "expected"),
    [("others", [3.542936, 2.805376, 1.811026]), ("uniform", [3.561686, 2.812072, 1.802098])],
)
def test_known_smoothed_losses(subject: Subject, tp_group: ProcessGroup, smoothing: str, expected: list[float]) -> None:
    logits = ((torch.arange(24.0, device=subject.device).view(3, 8) * 7) % 11) / 4
    target = torch.tensor([0, 5, 7], device=subject.device)
    shard = VocabShard.even(8, tp_group)
    loss = subject.loss(
        logits[:, shard.start : shard.stop],
        target,
        group=tp_group,
        shard=shard,
        label_smoothing=0.1,
        smoothing=smoothing,
    )
    torch.testing.assert_close(loss.cpu(), torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [LossOptions(), _SMOOTHED], ids=["plain", "smoothed"])
def test_one_collective_forward_and_none_backward(
    subject: Subject, tp_group: ProcessGroup, options: LossOptions
) -> None:
    logits = torch.randn(6, 16, device=subject.device, requires_grad=True)
    target = torch.arange(6, device=subject.device)
    with CommDebugMode() as forward:
        loss = subject.loss(logits, target, group=tp_group, options=options).sum()
    with CommDebugMode() as backward:
        loss.backward()
    assert forward.get_total_counts() == 1, forward.get_comm_counts()
    assert backward.get_total_counts() == 0, backward.get_comm_counts()


@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_no_rows(subject: Subject, tp_group: ProcessGroup, shape: tuple[int, ...], reduction: str) -> None:
    logits = torch.randn(*shape, 8, device=subject.device, requires_grad=True)
    target = torch.zeros(shape, dtype=torch.int64, device=subject.device)
    loss = subject.loss(logits, target, group=tp_group, reduction=reduction, label_smoothing=0.1)
    assert (loss == 0).all()
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape
    # The ranks still meet in what comes next.
    one = torch.ones(1, device=subject.device)
    dist.all_reduce(one, group=tp_group)
    assert one.item() == tp_group.size()


@pytest.mark.parametrize("interleaved", [False, True])
def test_disjoint_groups_at_once(subject: Subject, tp_group: ProcessGroup, interleaved: bool) -> None:
    ranks = tp_group.size()
    half = (ranks + 1) // 2
    members = (
        [list(range(0, ranks, 2)), list(range(1, ranks, 2))]
        if interleaved
        else [list(range(half)), list(range(half, ranks))]
    )
    groups = [dist.new_group(each) for each in members]
    mine = 0 if dist.get_rank() in members[0] else 1
    group = groups[mine]
    for case in [*_GROUP_CASES[:2], dataclasses.replace(_GROUP_CASES[0], options=_SMOOTHED)]:
        # Different problems in the two groups: one that listened to the other would be wrong.
        drawn = dataclasses.replace(case, offset=10.0 * mine, rows=(3 + mine,))
        _check_case(subject, drawn, _layouts(group.size())["uneven"], group)
    outside = groups[1 - mine]
    logits, target = torch.zeros(2, 4, device=subject.device), torch.zeros(2, device=subject.device).long()
    with pytest.raises(ValueError, match="group: expected a group that this rank is in"):
        subject.loss(logits, target, group=outside)
    for each in groups:
        if each is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(each)


def test_a_group_of_one_is_no_group(subject: Subject, tp_group: ProcessGroup) -> None:
    alone = [dist.new_group([rank]) for rank in range(tp_group.size())][dist.get_rank()]
    logits = torch.randn(3, 8, device=subject.device)
    target = torch.tensor([0, 3, 7], device=subject.device)
    assert torch.equal(subject.loss(logits, target, group=alone), subject.loss(logits, target))
    dist.destroy_process_group(alone)


def test_gathered_logits_with_a_declared_shard_are_refused(subject: Subject, tp_group: ProcessGroup) -> None:
    full = torch.randn(4, 3 * tp_group.size(), device=subject.device)
    shard = VocabShard.even(3 * tp_group.size(), tp_group)
    with pytest.raises(ValueError, match=rf"expected logits with stop - start = 3 columns, got .* {full.shape[1]} col"):
        subject.loss(full, torch.tensor([0, 1, 2, 5], device=subject.device), group=tp_group, shard=shard)


@pytest.mark.parametrize("faulty", ["one", "all"])
def test_checked_targets_raise_on_every_rank(subject: Subject, tp_group: ProcessGroup, faulty: str) -> None:
    last = tp_group.size() - 1
    size = 4 * tp_group.size()
    target = torch.tensor([0, -100, 2], device=subject.device)
    if faulty == "all" or dist.get_rank() == last:
        target[2] = size
    logits = torch.zeros(3, 4, device=subject.device)
    named = 0 if faulty == "all" else last
    with pytest.raises(IndexError, match=rf"rank {named} has 1 bad row.*row 2 with target {size}: expected"):
        subject.loss(logits, target, group=tp_group, check_targets=True)
    target[2] = size - 1
    assert subject.loss(logits, target, group=tp_group, check_targets=True).isfinite().all()


def test_unchecked_bad_targets_are_nan_on_every_rank(subject: Subject, tp_group: ProcessGroup) -> None:
    size = 4 * tp_group.size()
    logits = torch.zeros(5, 4, device=subject.device, requires_grad=True)
    target = torch.tensor([0, size, size + 7, -1, size - 1], device=subject.device)
    loss = subject.loss(logits, target, group=tp_group)
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, True, True, False]
    assert logits.grad.isnan().all(-1).tolist() == [False, True, True, True, False]


def test_the_same_bits_on_every_run(subject: Subject, tp_group: ProcessGroup) -> None:
    random = torch.Generator().manual_seed(dist.get_rank())
    logits = torch.randn(8, 300, generator=random).bfloat16().to(subject.device)
    target = (torch.arange(8) * 37 % (300 * tp_group.size())).to(subject.device)

    def run() -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = subject.loss(leaf, target, group=tp_group, options=_SMOOTHED)
        loss.sum().backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    first = run()
    for _ in range(20 if "interpreter" not in subject.name else 2):
        assert all(torch.equal(old, new) for old, new in zip(first, run(), strict=True))


def test_dropped_logits_are_overwritten_under_a_group(subject: Subject, tp_group: ProcessGroup) -> None:
    leaf = torch.randn(4, 8, device=subject.device, requires_grad=True)
    logits = leaf * 1.0
    addresses = [logits.data_ptr()]
    logits.register_hook(lambda grad: addresses.append(grad.data_ptr()))
    loss = subject.loss(logits, torch.arange(4, device=subject.device), group=tp_group)
    del logits
    loss.sum().backward()
    assert addresses[0] == addresses[1]


def test_a_rank_without_a_valid_token(subject: Subject, tp_group: ProcessGroup) -> None:
    """Context parallelism: every rank has its own tokens; the last one's are all masked."""
    rank, ranks = dist.get_rank(), tp_group.size()
    random = torch.Generator().manual_seed(5)
    values = torch.randn(ranks, 4, 8, generator=random)
    targets = torch.randint(8, (ranks, 4), generator=random)
    masks = torch.ones(ranks, 4)
    masks[-1] = 0
    leaf = values[rank].to(subject.device).requires_grad_()
    mask = masks[rank].to(subject.device)
    loss = (subject.loss(leaf, targets[rank].to(subject.device)) * mask).sum() / mask.sum().clamp(min=1)
    loss.backward()
    if rank == ranks - 1:
        assert loss.item() == 0.0
        assert (leaf.grad == 0).all()
    total = loss.detach().clone()
    dist.all_reduce(total, group=tp_group)
    x = values[:-1].double()
    expected = torch.nn.functional.cross_entropy(x.view(-1, 8), targets[:-1].reshape(-1), reduction="sum") / 4
    assert abs(total.item() - expected.item()) < 1e-5


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_compiled_on_a_group(subject: Subject, tp_group: ProcessGroup, alpha: float) -> None:
    def step(logits: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits * 2, target, group=tp_group, label_smoothing=alpha)

    random = torch.Generator().manual_seed(31 + dist.get_rank(tp_group))
    logits = torch.randn(4, 24, generator=random).to(subject.device)
    target = torch.arange(4, device=subject.device) * 5
    torch._dynamo.reset()
    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, target)
        loss.sum().backward()
        results.append((loss.detach(), leaf.grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_a_compiled_loss_that_one_rank_does_not_use(subject: Subject, tp_group: ProcessGroup) -> None:
    def step(logits: Tensor, target: Tensor) -> Tensor:
        loss = vocab_parallel_cross_entropy(logits, target, group=tp_group)
        return loss if used else logits * 2

    used = dist.get_rank(tp_group) == 0
    torch._dynamo.reset()
    logits = torch.ones(3, 8, device=subject.device)
    target = torch.zeros(3, dtype=torch.int64, device=subject.device)
    # Rank 0 waits for the statistics of the others.
    result = torch.compile(step, backend="aot_eager", fullgraph=True)(logits, target)
    dist.barrier(tp_group)
    # Eager, on every rank.
    loss = vocab_parallel_cross_entropy(logits, target, group=tp_group)
    assert torch.equal(result, loss if used else logits * 2)
