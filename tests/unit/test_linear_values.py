"""The linear loss, every output and all gradients against float64: each option alone and in pairs, in ragged chunks."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from te_ce import linear_cross_entropy
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.broken_linear import BROKEN_STEPS, BROKEN_VOCABULARY_WALKS, broken_subject, logits_rounded_twice
from tests.support.linear import LinearCase, check, cut_into, run, truth_of
from tests.support.linear_cases import LINEAR_CASES, LINEAR_PAIRS, linear_case
from tests.support.subject import Subject


def check_case(subject: Subject, case: LinearCase, dtype: torch.dtype | None = None) -> None:
    """Every output, with random upstream gradients for all of them at once."""
    inputs = case.draw(subject.device, dtype)
    with case.cut() as keep:
        check(subject, inputs, run(subject, inputs, keep=keep))


@pytest.mark.parametrize("case", LINEAR_CASES[1::2], ids=str)
def test_values_and_gradients_match_float64(subject: Subject, case: LinearCase) -> None:
    check_case(subject, case)


@pytest.mark.parametrize("case", [*LINEAR_CASES, *LINEAR_PAIRS], ids=str)
def test_all_options_on_the_twin(twin: Subject, case: LinearCase) -> None:
    check_case(twin, case)


@pytest.mark.parametrize("case", LINEAR_PAIRS[::9], ids=str)
def test_some_pairs_of_options(subject: Subject, case: LinearCase) -> None:
    """That the kernels agree with the twin on all of them is tested with logits."""
    check_case(subject, case)


@pytest.mark.parametrize("case", [*LINEAR_CASES, *LINEAR_PAIRS], ids=str)
def test_float64_is_float64_throughout(twin: Subject, case: LinearCase) -> None:
    if case.has_row_scale or case.options.label_smoothing == 0.1:
        # These factors are rounded to float32 by their nature, or by the reference.
        return
    inputs = case.draw(twin.device, torch.float64)
    with case.cut() as keep:
        result = run(twin, inputs, keep=keep)
    truth = truth_of(inputs)
    check(twin, inputs, result, truth)
    for name in ("loss", "log_probs", "entropy", "lse"):
        error = (result.values[name].reshape(-1).cpu() - getattr(truth.rows, name)).abs().max()
        assert error <= 1e-12, f"{name}: {error:.3g}"


_FIELDS = OutputGrads._fields
_SUBSETS = [names for count in (1, 3) for names in itertools.combinations(_FIELDS, count)]


@pytest.mark.parametrize("used", _SUBSETS, ids="+".join)
def test_any_subset_of_gradients(twin: Subject, used: tuple[str, ...]) -> None:
    case = linear_case("all")
    inputs = case.draw(twin.device)
    inputs = inputs._replace(grads=OutputGrads(*(g if n in used else None for n, g in inputs.grads._asdict().items())))
    with case.cut() as keep:
        check(twin, inputs, run(twin, inputs, keep=keep))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_any_subset_of_outputs_gives_the_same_values(twin: Subject, count: int) -> None:
    case = linear_case("all")
    inputs = case.draw(twin.device)
    with case.cut() as keep:
        everything = run(twin, inputs, keep=keep)
        for outputs in itertools.combinations(OUTPUTS, count):
            of_used = (g if n in ("loss", *outputs) else None for n, g in inputs.grads._asdict().items())
            part = inputs._replace(grads=OutputGrads(*of_used))
            result = run(twin, part, outputs, keep=keep)
            assert list(result.values) == ["loss", *outputs]
            check(twin, part, result)
            for name, value in result.values.items():
                assert torch.equal(value, everything.values[name]), f"{name} depends on what else is asked for"


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_what_is_kept_changes_no_bit(subject: Subject, keep: object) -> None:
    case = linear_case("plain_bf16")
    inputs = case.draw(subject.device)
    with case.cut():
        first, other = run(subject, inputs), run(subject, inputs, keep=keep)
    assert all(torch.equal(first.values[name], other.values[name]) for name in first.values)
    assert all(torch.equal(first.grads[name], other.grads[name]) for name in first.grads)


def test_many_chunks_are_summed_in_float32(twin: Subject) -> None:
    # Equal logits: up to the target in the last column the sum grows by 1/700 a time, which bfloat16 loses beside 1/2.
    hidden = torch.ones(3, 8, dtype=torch.bfloat16, device=twin.device).requires_grad_()
    weight = torch.ones(700, 8, dtype=torch.bfloat16, device=twin.device)
    target = torch.full((3,), 699, device=twin.device)
    with cut_into(1), twin.serving():
        linear_cross_entropy(hidden, weight, target).sum().backward()
    assert hidden.grad.abs().max() < 0.01


_BROKEN_CASES = ["all", "all_bf16_row_scale"]


@pytest.mark.parametrize("case", _BROKEN_CASES)
@pytest.mark.parametrize("broken", BROKEN_VOCABULARY_WALKS)
def test_a_broken_walk_is_refused(twin: Subject, broken: str, case: str) -> None:
    with BROKEN_VOCABULARY_WALKS[broken](), pytest.raises(AssertionError):
        check_case(twin, linear_case(case))


@pytest.mark.parametrize("case", ["plain_bf16", "plain_fp16"])
def test_logits_that_are_rounded_twice_are_refused(twin: Subject, case: str) -> None:
    with logits_rounded_twice(), pytest.raises(AssertionError):
        check_case(twin, dataclasses.replace(linear_case(case), rows=(2, 8)))


@pytest.mark.parametrize("case", _BROKEN_CASES)
@pytest.mark.parametrize("broken", BROKEN_STEPS)
def test_a_lost_option_is_refused(twin: Subject, broken: str, case: str) -> None:
    with pytest.raises(AssertionError):
        check_case(broken_subject(twin, broken), linear_case(case))


@pytest.mark.parametrize("case", [*LINEAR_CASES, *LINEAR_PAIRS], ids=str)
@pytest.mark.parametrize("broken", ["gradient_doubled", "target_shifted", "off_target_zeroed"])
def test_every_case_refuses_a_wrong_gradient(twin: Subject, broken: str, case: LinearCase) -> None:
    with pytest.raises(AssertionError):
        check_case(broken_subject(twin, broken), case)
