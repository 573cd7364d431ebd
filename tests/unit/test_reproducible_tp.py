"""The same bits for any number of ranks, where their shards end at the blocks of `reproducible_tp`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from te_ce import LossOptions, VocabShard
from te_ce.outputs import OUTPUTS, OutputGrads
from te_ce.problem import ShardProblem
from tests.support.bits import same_bits
from tests.support.subject import Subject
from tests.support.whole import Drawn, Result, WholeCase, check_whole, run_whole

_ALL = LossOptions(
    reproducible_tp=True, scale=1.25, softcap=8.0, z_loss_weight=0.02, label_smoothing=0.1, smoothing="others"
)
_PLAIN = LossOptions(reproducible_tp=True)
_CASES = [
    WholeCase("plain", _PLAIN, spread=5.0),
    WholeCase("plain_bf16", _PLAIN, dtype=torch.bfloat16),
    WholeCase("all", _ALL),
    WholeCase("all_fp16_row_scale", _ALL, dtype=torch.float16, has_row_scale=True),
    WholeCase("uniform_masked", LossOptions(reproducible_tp=True, label_smoothing=0.1), is_masked=True),
    WholeCase("confident", _PLAIN, confident=0.999),
    WholeCase("offset", _ALL, offset=30.0),
]
# A kernel runs a block of a row at a time, which is slow where it is interpreted.
_FEW_CASES = [
    dataclasses.replace(case, rows=(2,)) for case in _CASES if case.name in ("all", "plain_bf16", "all_fp16_row_scale")
]


@pytest.fixture(autouse=True)
def block(request: pytest.FixtureRequest) -> Iterator[int]:
    """Columns of a block, as few as each implementation can do with."""
    subject: Subject = request.getfixturevalue("subject" if "subject" in request.fixturenames else "twin")
    columns = 64 if subject.name.startswith("torch") else 2048
    with subject.reproducible_blocks_of(columns):
        yield columns


def _equal(columns: int, ranks: int) -> list[int]:
    return [columns // ranks] * ranks


# Of every rank, in blocks; the last column of the "odd" ones is inside a block.
_LAYOUTS: dict[str, list[list[float]]] = {
    "multiple": [[4, 4], [2, 2, 2, 2], [1] * 8, [1, 7], [2, 0, 5, 1]],
    "odd": [[3, 2.3], [5, 0.3], [1, 2, 1, 1.3], [1, 1, 0, 1, 0, 0, 1, 1.3], [2, 3.3, 0, 0]],
    "few_multiple": [[1, 1, 1, 1]],
    "few_odd": [[1, 0, 1, 1.3]],
}


def _layouts(name: str, block: int) -> list[list[int]]:
    return [[int(part * block) for part in layout] for layout in _LAYOUTS[name]]


def _assert_same_bits(results: Sequence[Result], alone: Result) -> None:
    for result in results:
        for name, value in result.values.items():
            assert same_bits(value, alone.values[name]), f"{name}: other bits"
    assert same_bits(torch.cat([result.grad for result in results], -1), alone.grad), "gradient: other bits"


def _check_bits_of_any_ranks(subject: Subject, block: int, case: WholeCase, vocabulary: str) -> None:
    layouts = _layouts(vocabulary, block)
    case = dataclasses.replace(case, columns=sum(layouts[0]))
    drawn = case.draw(subject.device)
    (alone,) = run_whole(subject, drawn, [case.columns])
    check_whole(subject, drawn, [alone])
    for widths in layouts:
        _assert_same_bits(run_whole(subject, drawn, widths), alone)
        if len(set(widths)) == 1:
            _assert_same_bits(run_whole(subject, drawn, widths, equal_shards=True), alone)


@pytest.mark.parametrize("vocabulary", ["few_multiple", "few_odd"])
@pytest.mark.parametrize("case", _FEW_CASES, ids=str)
def test_bits_do_not_depend_on_the_ranks(subject: Subject, block: int, case: WholeCase, vocabulary: str) -> None:
    _check_bits_of_any_ranks(subject, block, case, vocabulary)


@pytest.mark.parametrize("vocabulary", ["multiple", "odd"])
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_the_twin_on_up_to_eight_ranks(twin: Subject, block: int, case: WholeCase, vocabulary: str) -> None:
    _check_bits_of_any_ranks(twin, block, case, vocabulary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sign_of_a_vanished_probability(subject: Subject, block: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 2 * block, dtype=dtype, device=subject.device)
    logits[:, block : block + 4] = -300.0
    target = torch.tensor([5, block + 9], device=subject.device)
    g = torch.tensor([-1.0, -0.5], device=subject.device)
    drawn = Drawn(logits, target, LossOptions(reproducible_tp=True), OutputGrads(g))
    (alone,) = run_whole(subject, drawn, [2 * block])
    assert alone.grad[:, block : block + 4].signbit().all()
    _assert_same_bits(run_whole(subject, drawn, [block, block]), alone)


@pytest.mark.parametrize("case", _FEW_CASES, ids=str)
def test_padding_changes_no_bit(subject: Subject, block: int, case: WholeCase) -> None:
    """Padding up to a multiple of the ranks: a rank may hold nothing else."""
    columns, classes = 4 * block, block + 11
    case = dataclasses.replace(case, columns=columns, options=dataclasses.replace(case.options, vocab_size=classes))
    drawn = case.draw(subject.device)
    (alone,) = run_whole(subject, drawn, [columns])
    check_whole(subject, drawn, [alone])
    for ranks in (2, 4):
        _assert_same_bits(run_whole(subject, drawn, _equal(columns, ranks), equal_shards=True), alone)
    unpadded = drawn._replace(logits=drawn.logits[..., :classes].contiguous())
    for widths in ([classes], [block, classes - block]):
        results = run_whole(subject, unpadded, widths)
        cut = alone._replace(grad=alone.grad[..., :classes])
        _assert_same_bits(results, cut)


@pytest.mark.parametrize("case", _FEW_CASES, ids=str)
def test_the_public_function_gives_these_bits(subject: Subject, block: int, case: WholeCase) -> None:
    drawn = dataclasses.replace(case, columns=2 * block).draw(subject.device)
    logits, target, options, grads = drawn
    leaf = logits.clone().requires_grad_()
    got = subject.loss(leaf, target, options=options, outputs=OUTPUTS)
    torch.autograd.backward([getattr(got, name) for name in OutputGrads._fields], list(grads))
    assert leaf.grad is not None
    alone = Result(got._asdict(), leaf.grad)
    _assert_same_bits(run_whole(subject, drawn, _equal(2 * block, 2)), alone)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", _FEW_CASES, ids=str)
def test_a_row_alone_and_in_a_batch(subject: Subject, block: int, case: WholeCase, ranks: int) -> None:
    drawn = dataclasses.replace(case, columns=2 * block, rows=(3,)).draw(subject.device)
    batch = run_whole(subject, drawn, _equal(2 * block, ranks))
    for row in range(3):
        options = drawn.options
        if drawn.row_scale is not None:
            options = dataclasses.replace(options, scale=drawn.row_scale[row : row + 1])
        one = Drawn(
            drawn.logits[row : row + 1].clone(),
            drawn.target[row : row + 1].clone(),
            options,
            OutputGrads(*(grad[row : row + 1].clone() for grad in drawn.grads)),
        )
        expected = [
            Result({name: value[row : row + 1] for name, value in each.values.items()}, each.grad[row : row + 1])
            for each in batch
        ]
        for got, whole in zip(run_whole(subject, one, _equal(2 * block, ranks)), expected, strict=True):
            _assert_same_bits([got], whole)


def test_without_it_some_bits_differ(twin: Subject, block: int) -> None:
    """What these tests would see if the blocks were not merged in their global order."""
    case = WholeCase("plain", LossOptions(), columns=8 * block, rows=(50,))
    drawn = case.draw(twin.device)
    (alone,) = run_whole(twin, drawn, [8 * block])
    with pytest.raises(AssertionError, match="other bits"):
        _assert_same_bits(run_whole(twin, drawn, _equal(8 * block, 2)), alone)


def test_a_block_that_is_all_masked(subject: Subject, block: int) -> None:
    case = WholeCase("masked", _PLAIN, columns=4 * block, rows=(3,))
    drawn = case.draw(subject.device)
    drawn.logits[0, : 2 * block] = -math.inf
    drawn.logits[1, block:] = -math.inf
    drawn.target[:2] = torch.tensor([2 * block + 2, 5], device=subject.device)
    (alone,) = run_whole(subject, drawn, [4 * block])
    check_whole(subject, drawn, [alone])
    for widths in _layouts("few_multiple", block):
        _assert_same_bits(run_whole(subject, drawn, widths), alone)


@pytest.mark.parametrize("start_stop_size", [(0, 1.1, 2), (1.1, 2, 2), (0, 0.9, 3), (1, 2.5, 3)], ids=str)
def test_shards_that_end_inside_a_block_are_refused(
    subject: Subject, block: int, start_stop_size: tuple[float, float, float]
) -> None:
    shard = VocabShard(*(int(each * block) for each in start_stop_size))
    message = rf"reproducible_tp: expected shards that begin and end at multiples of {block} columns, got .*=\d+; pad"
    with pytest.raises(ValueError, match=message):
        ShardProblem.resolve(_PLAIN, shard, 2)
    ShardProblem.resolve(LossOptions(), shard, 2)


def test_one_rank_takes_any_vocabulary(subject: Subject, block: int) -> None:
    for columns in (1, block - 1, block, block + 1):
        drawn = WholeCase("any", _PLAIN, columns=columns).draw(subject.device)
        check_whole(subject, drawn, run_whole(subject, drawn, [columns]))
