"""Parts of a shard combined to one, then merged with other shards: as if all parts had been merged at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, VocabShard
from te_ce.outputs import OUTPUTS, OutputGrads
from te_ce.problem import ShardProblem
from tests.support.subject import Subject
from tests.support.whole import Drawn, Result, check_whole

_OPTIONS = {
    "plain": LossOptions(),
    "uniform": LossOptions(label_smoothing=0.1),
    "all": LossOptions(label_smoothing=0.2, smoothing="others", z_loss_weight=0.1, scale=-0.75, vocab_size=20),
}
# Two ranks of 13 and 11 columns, cut into unequal numbers of parts; three, of which one is empty and one padding.
_CUTS = [((0, 5, 10, 13), (13, 24)), ((0, 12, 13), (13, 13), (13, 20), (20, 24)), ((0, 24),)]


def _problems(shards: Sequence[Sequence[int]], options: LossOptions, outputs: tuple[str, ...]) -> list[ShardProblem]:
    shards = [VocabShard(ends[0], ends[-1], 24) for ends in shards]  # type: ignore[misc]
    return [ShardProblem.resolve(options, shard, len(shards), outputs) for shard in shards]  # type: ignore[arg-type]


def _parts_of(
    subject: Subject, logits: Tensor, target: Tensor, problem: ShardProblem, ends: Sequence[int]
) -> list[Tensor]:
    """Statistics of the parts of one shard that end there, as the walk over the vocabulary makes them."""
    first = ends[0]
    real = problem.real_columns
    cuts = [slice(min(a - first, real), min(b - first, real)) for a, b in itertools.pairwise(ends)]
    cuts = [cut for cut in cuts if cut.stop > cut.start] or [slice(0, 0)]
    return [
        subject.backend.row_statistics(
            logits[:, first + cut.start : first + cut.stop].contiguous(), target, problem.of_columns(cut)
        )
        for cut in cuts
    ]


def _merged(
    subject: Subject,
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    shards: Sequence[Sequence[int]],
    combines: bool,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Result:
    problems = _problems(shards, options, outputs)
    gathered = []
    for problem, ends in zip(problems, shards, strict=True):
        parts = torch.cat(_parts_of(subject, logits, target, problem, ends))
        combined = subject.backend.combine_statistics(parts, problem) if combines else parts
        assert combined.shape == ((1, *parts.shape[1:]) if combines else parts.shape)
        gathered.append(combined)
    loss, saved, others = subject.backend.merge_statistics(torch.cat(gathered), target, problems[0])
    whole = _problems([(0, 24)], options, outputs)[0]
    grad = torch.full_like(logits, torch.nan)
    grads = OutputGrads(*(torch.ones_like(loss) for _ in OutputGrads._fields))
    subject.backend.logits_gradient(logits, target, grads, saved, grad, whole)
    return Result({"loss": loss, **dict(zip(outputs, others, strict=True))}, grad)


def _draw(subject: Subject) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(41)
    logits = torch.randn(5, 24, generator=random) * 3
    target = torch.tensor([0, 19, 12, 13, -100])
    return logits.to(subject.device), target.to(subject.device)


@pytest.mark.parametrize("shards", _CUTS, ids=str)
@pytest.mark.parametrize("name", ["uniform", "all"])
def test_combined_first_and_then_merged(subject: Subject, name: str, shards: Sequence[Sequence[int]]) -> None:
    (logits, target), options = _draw(subject), _OPTIONS[name]
    grads = OutputGrads(*(torch.ones(5, device=subject.device) for _ in OutputGrads._fields))
    result = _merged(subject, logits, target, options, shards, combines=True)
    check_whole(subject, Drawn(logits, target, options, grads), [result])


def test_parts_that_are_minus_infinity(subject: Subject) -> None:
    """In rows 0 to 3: a part, a shard, all of a shard's parts but one, all but the last column."""
    (logits, target), options = _draw(subject), _OPTIONS["uniform"]
    logits[0, :5] = -math.inf
    logits[1, :13] = -math.inf
    logits[2, :10] = -math.inf
    logits[3, :23] = -math.inf
    target[0], target[3] = 9, 23
    expected = _merged(subject, logits, target, options, [(0, 24)], combines=False)
    for shards in _CUTS:
        result = _merged(subject, logits, target, options, shards, combines=True)
        for field, value in result.values.items():
            torch.testing.assert_close(value, expected.values[field], msg=field)
            assert not value.isnan().any(), field
        torch.testing.assert_close(result.grad, expected.grad)


def test_a_row_without_a_softmax_is_nan_all_the_same(subject: Subject) -> None:
    logits, target = _draw(subject)
    logits[0] = -math.inf
    logits[1, 3] = math.nan
    logits[2, 20] = math.inf
    for shards in _CUTS:
        result = _merged(subject, logits, target, LossOptions(), shards, combines=True)
        for field in ("loss", "log_probs", "entropy"):
            assert result.values[field].isnan().tolist() == [True] * 3 + [False] * 2, field
        # As argmax has it.
        assert result.values["predictions"][0] == 0


@pytest.mark.parametrize("outputs", [(), ("entropy",), ("predictions",), OUTPUTS], ids="+".join)
@pytest.mark.parametrize("name", ["plain", "uniform"])
def test_the_identity_stays_the_identity(subject: Subject, name: str, outputs: tuple[str, ...]) -> None:
    """What a rank without columns sends: after the combination, bit for bit."""
    _, target = _draw(subject)
    problem = _problems([(0, 13), (13, 13), (13, 24)], _OPTIONS[name], outputs)[1]
    empty = subject.backend.row_statistics(target.new_empty((5, 0), dtype=torch.float32), target, problem)
    for count in (1, 3):
        combined = subject.backend.combine_statistics(torch.cat([empty] * count), problem)
        assert torch.equal(combined.view(torch.int32), empty.view(torch.int32))


@pytest.mark.parametrize("name", ["plain", "uniform"])
def test_one_part_stays_as_it_is(subject: Subject, name: str) -> None:
    logits, target = _draw(subject)
    target = target.where(target >= 0, 0)
    (problem,) = _problems([(0, 24)], _OPTIONS[name], OUTPUTS)
    part = subject.backend.row_statistics(logits, target, problem)
    combined = subject.backend.combine_statistics(part, problem)
    assert torch.equal(combined.view(torch.int32), part.view(torch.int32))


def test_ties_go_to_the_smallest_id(subject: Subject) -> None:
    logits, target = torch.zeros(4, 24, device=subject.device), torch.zeros(4, dtype=torch.int64, device=subject.device)
    for row, columns in enumerate([(3, 7, 20), (12, 13), (23,), (6, 11)]):
        logits[row, list(columns)] = 2.0
    for shards in _CUTS:
        result = _merged(subject, logits, target, LossOptions(), shards, combines=True)
        assert result.values["predictions"].tolist() == [3, 12, 23, 6]


def test_columns_are_counted(subject: Subject) -> None:
    """Smoothing has the mean over all: a count that was lost shows in the loss only where maxima differ."""
    logits, target = _draw(subject)
    problem = _problems([(0, 5, 10, 13), (13, 24)], _OPTIONS["uniform"], ())[0]
    parts = torch.cat(_parts_of(subject, logits, target, problem, (0, 5, 10, 13)))
    kept = target != -100
    assert parts[:, 4, 0].tolist() == [5, 5, 3]
    combined = subject.backend.combine_statistics(parts, problem)
    assert (combined[0, 4][kept] == 13).all()
    expected = (logits[:, :13].double() - logits[:, :13].double().amax(-1, keepdim=True)).sum(-1)
    torch.testing.assert_close(combined[0, 3].double()[kept], expected[kept], rtol=1e-5, atol=1e-5)


def test_no_rows(subject: Subject) -> None:
    (problem,) = _problems([(0, 24)], LossOptions(), ())
    assert subject.backend.combine_statistics(torch.empty(3, 3, 0, device=subject.device), problem).shape == (1, 3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 5), (2050,), (4, 1024), (3, 4097)], ids=str)
def test_a_scaled_copy_is_rounded_once(subject: Subject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(43)
    total = torch.randn(shape, generator=random).to(subject.device)
    before, factor = total.clone(), torch.tensor(-1 / 3, device=subject.device)
    out = subject.backend.scaled_copy(total, factor, dtype)
    assert out.data_ptr() != total.data_ptr() or not out.numel()
    assert torch.equal(total, before)
    assert (out.shape, out.dtype) == (total.shape, dtype)
    # The product of two float32 is exact in float64; float32 itself is a rounding on the way, but a small one.
    exact = total.double() * factor.double()
    half_unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    units = subject.allowed_ulps(dtype) * 2 * half_unit
    assert ((out.double() - exact).abs() <= exact.abs() * (units + 2.0**-23) + 2.0**-25).all()


def test_special_factors(subject: Subject) -> None:
    total = torch.tensor([1.0, -2.0, math.inf, math.nan, 0.0], device=subject.device)
    for value in (0.0, math.inf, math.nan, -1.0):
        factor = torch.tensor(value, device=subject.device)
        out = subject.backend.scaled_copy(total, factor, torch.float32)
        torch.testing.assert_close(out, total * value, rtol=0, atol=0, equal_nan=True)


def test_a_combination_that_forgets_is_refused(twin: Subject) -> None:
    """Columns, t or the shift of s lost: each fails the comparison with the truth."""
    combine = twin.backend.combine_statistics

    def broken(lost: int) -> Subject:
        def forgets(gathered: Tensor, problem: ShardProblem) -> Tensor:
            combined = combine(gathered, problem)
            combined[:, lost] = gathered[-1, lost]
            return combined

        return dataclasses.replace(twin, backend=twin.backend._replace(combine_statistics=forgets))

    for lost in range(7):
        if lost == 4:
            # Only what is merged later shows it: with one shard nothing is.
            with pytest.raises(AssertionError):
                test_columns_are_counted(broken(lost))
            continue
        with pytest.raises(AssertionError):
            test_combined_first_and_then_merged(broken(lost), "uniform", _CUTS[0])


def test_a_shard_of_nan_is_not_an_empty_one(subject: Subject) -> None:
    """Nor is one of NaN and -inf: the row is NaN whatever the other shards hold."""
    problems = _problems([(0, 5, 12), (12, 24)], _OPTIONS["uniform"], ())
    logits, target = _draw(subject)
    logits = logits.clone()
    logits[0, :12] = torch.nan
    logits[1, :12] = -torch.inf
    logits[1, 3] = torch.nan
    combined = [
        subject.backend.combine_statistics(torch.cat(_parts_of(subject, logits, target, problem, ends)), problem)
        for problem, ends in zip(problems, [(0, 5, 12), (12, 24)], strict=True)
    ]
    loss, _, _ = subject.backend.merge_statistics(torch.cat(combined), target, problems[0])
    assert loss.view(-1)[:2].isnan().all()
    assert loss.view(-1)[2:].isfinite().all()
