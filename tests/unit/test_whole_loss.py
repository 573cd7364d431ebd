"""Every option, alone and in pairs, with every output and upstream gradient, against float64 on 1, 2 and 4 shards."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from te_ce import vocab_parallel_cross_entropy
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.broken_whole import BROKEN_WHOLE
from tests.support.subject import Subject
from tests.support.whole import WHOLE_CASES, Drawn, Result, WholeCase, case_named, check_whole, run_whole


@pytest.mark.parametrize("ranks", [4])
@pytest.mark.parametrize("case", WHOLE_CASES, ids=str)
def test_values_and_gradient_match_float64(subject: Subject, case: WholeCase, ranks: int) -> None:
    drawn = case.draw(subject.device)
    check_whole(subject, drawn, run_whole(subject, drawn, case.widths(ranks)))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", WHOLE_CASES, ids=str)
def test_the_twin_on_fewer_ranks(twin: Subject, case: WholeCase, ranks: int) -> None:
    """The kernels do on two ranks what they do on four, and on one what the public function does."""
    drawn = case.draw(twin.device)
    check_whole(twin, drawn, run_whole(twin, drawn, case.widths(ranks)))


@pytest.mark.parametrize("name", ["all", "uniform_masked", "row_scale_masked_padded", "wide_range"])
def test_rows_read_in_parts_match_float64(subject: Subject, name: str) -> None:
    case = case_named(name)
    drawn = case.draw(subject.device)
    with subject.reading_in_parts_of(32):
        check_whole(subject, drawn, run_whole(subject, drawn, case.widths(2)))


def _run_public(subject: Subject, drawn: Drawn, outputs: tuple[str, ...] = OUTPUTS) -> Result:
    logits, target, options, grads = drawn
    leaf = logits.clone().requires_grad_()
    with subject.serving():
        got = vocab_parallel_cross_entropy(leaf, target, options=options, outputs=outputs)
    values = {name: value for name, value in got._asdict().items() if value is not None}
    used = [(values[name], g) for name, g in grads._asdict().items() if g is not None]
    torch.autograd.backward([value for value, _ in used], [g for _, g in used])
    assert leaf.grad is not None
    return Result(values, leaf.grad)


@pytest.mark.parametrize("case", WHOLE_CASES, ids=str)
def test_public_function_matches_float64(subject: Subject, case: WholeCase) -> None:
    drawn = case.draw(subject.device)
    result = _run_public(subject, drawn)
    assert list(result.values) == ["loss", *OUTPUTS]
    assert result.grad.dtype == case.dtype
    check_whole(subject, drawn, [result])


_SUBSETS = [names for count in range(1, 5) for names in itertools.combinations(OutputGrads._fields, count)]


@pytest.mark.parametrize("used", _SUBSETS, ids="+".join)
def test_any_subset_of_gradients(subject: Subject, used: tuple[str, ...]) -> None:
    drawn = case_named("all").draw(subject.device)
    drawn = drawn._replace(grads=OutputGrads(*(g if n in used else None for n, g in drawn.grads._asdict().items())))
    check_whole(subject, drawn, run_whole(subject, drawn, (41, 55)))
    check_whole(subject, drawn, [_run_public(subject, drawn)])


@pytest.mark.parametrize("count", range(1, 4))
def test_any_subset_of_outputs(subject: Subject, count: int) -> None:
    whole = case_named("all").draw(subject.device)
    everything = _run_public(subject, whole)
    for outputs in itertools.combinations(OUTPUTS, count):
        grads = OutputGrads(*(g if n in ("loss", *outputs) else None for n, g in whole.grads._asdict().items()))
        drawn = whole._replace(grads=grads)
        result = _run_public(subject, drawn, outputs)
        check_whole(subject, drawn, [result])
        for output, value in result.values.items():
            assert torch.equal(value, everything.values[output]), f"{output} depends on what else is asked for"


_REFUSALS = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name, (_, applies, _) in BROKEN_WHOLE.items()
    for case in WHOLE_CASES
    if applies(case) and case.columns <= 200
]


@pytest.mark.parametrize(("broken", "case"), _REFUSALS)
def test_the_bounds_refuse_a_broken_loss(twin: Subject, broken: str, case: WholeCase) -> None:
    make, _, ranks = BROKEN_WHOLE[broken]
    wrong = dataclasses.replace(twin, backend=make(twin.backend))
    with pytest.raises(AssertionError):
        test_values_and_gradient_match_float64(wrong, case, ranks)


@pytest.mark.parametrize("broken", BROKEN_WHOLE)
def test_a_broken_loss_is_refused(subject: Subject, broken: str) -> None:
    make, applies, ranks = BROKEN_WHOLE[broken]
    wrong = dataclasses.replace(subject, backend=make(subject.backend))
    case = case_named("all_fp16_row_scale")
    assert applies(case)
    with pytest.raises(AssertionError):
        test_values_and_gradient_match_float64(wrong, case, ranks)
    if ranks == 1:
        with pytest.raises(AssertionError):
            test_public_function_matches_float64(wrong, case)
