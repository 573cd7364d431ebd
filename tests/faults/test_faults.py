"""Ranks that die, disagree or fail in the middle of a loss: the others get an error in time, and nobody hangs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.faults.launch import SLACK_S, TIMEOUT_S, Outcome, run_ranks

_LOST = r"Connection (closed|reset) by peer|Broken pipe"
# Of a message that is longer than the memory it is for, gloo makes the end of the process that it was sent to.
_ABORTED = -6
_DIED, _KILLED = 3, -9


def _error(outcome: Outcome, kind: str, message: str, within_s: float = SLACK_S) -> None:
    assert outcome.status == 0, outcome
    assert outcome.seen["error"] == kind, outcome
    assert re.search(message, outcome.seen["message"]), outcome
    assert outcome.seen["seconds"] < within_s, outcome


def test_the_harness_tells_a_rank_that_hangs() -> None:
    one, other = run_ranks("scenarios.hangs", wall_s=12.0)
    assert (one.status, one.seen) == (0, {})
    assert other.status is None


@pytest.mark.parametrize(("ranks", "checked"), [(2, False), (2, True), (3, False)])
def test_a_rank_dies_before_the_collective(ranks: int, checked: bool) -> None:
    *others, dead = run_ranks("scenarios.dies_before_the_collective", ranks, checked=checked)
    assert dead.status == _DIED
    for outcome in others:
        _error(outcome, "RuntimeError", _LOST)
        assert outcome.seen["logits_kept"]


@pytest.mark.parametrize(("ranks", "checked"), [(2, False), (2, True), (3, False)])
def test_a_rank_is_killed_in_the_collective(ranks: int, checked: bool) -> None:
    *others, dead = run_ranks("scenarios.is_killed_in_the_collective", ranks, checked=checked)
    assert dead.status == _KILLED
    for outcome in others:
        _error(outcome, "RuntimeError", _LOST)
        assert outcome.seen["seconds"] > 0.9, "it did not wait in the collective"
        assert outcome.seen["logits_kept"]


@pytest.mark.parametrize("how", ["recompute", "sequence_parallel", "token_weights"])
def test_a_rank_dies_in_backward_of_the_linear_loss(how: str) -> None:
    survivor, dead = run_ranks("scenarios.dies_in_backward_of_the_linear_loss", how=how)
    assert dead.status == _DIED
    _error(survivor, "RuntimeError", _LOST)
    assert survivor.seen["in_backward"] == (how != "token_weights")  # whose gradients are made in forward
    assert survivor.seen["parameters_kept"]
    assert survivor.seen["grads"] == [False, False]


def test_a_rank_dies_in_backward_of_the_loss() -> None:
    survivor, dead = run_ranks("scenarios.dies_in_backward_of_the_loss")
    assert dead.status == _DIED
    assert survivor.status == 0
    assert survivor.seen["error"] is None, survivor
    assert survivor.seen["wrong"] < 1e-6
    assert survivor.seen["next"]["error"] == "RuntimeError"
    assert re.search(_LOST, survivor.seen["next"]["message"])
    assert survivor.seen["next"]["seconds"] < SLACK_S


_NAMED = {
    "fewer rows": r"target\.shape: .* got \(2, 3\) on rank 0, \(2, 2\) on rank 1",
    "more rows": r"target\.shape: .* got \(2, 3\) on rank 0, \(4, 3\) on rank 1",
    "bfloat16": r"logits\.dtype: .* got torch.float32 on rank 0, torch.bfloat16 on rank 1",
    "float64": r"logits\.dtype: .* got torch.float32 on rank 0, torch.float64 on rank 1",
    "smoothing": "label_smoothing: .* got 0 on rank 0, 0.1 on rank 1",
    "entropy": r"outputs: .* got \(\) on rank 0, \('entropy',\) on rank 1",
    "lse": r"outputs: .* got \(\) on rank 0, \('lse',\) on rank 1",
    "width": "logits: expected as many columns on every rank .* got 8 on rank 0, 7 on rank 1",
}


@pytest.mark.parametrize("what", list(_NAMED))
def test_ranks_disagree_checked(what: str) -> None:
    outcomes = run_ranks("scenarios.disagrees", what=what, checked=True)
    for outcome in outcomes:
        _error(outcome, "ValueError", _NAMED[what])
        assert outcome.seen["logits_kept"]
    assert len({outcome.seen["message"] for outcome in outcomes}) == 1


def _is_right(seen: dict[str, Any]) -> bool:
    return seen.get("error") is None and seen.get("wrong", 1.0) < 1e-6 and seen.get("wrong_grad", 1.0) < 1e-6


@pytest.mark.parametrize("what", ["fewer rows", "more rows", "float64", "smoothing", "entropy", "predictions"])
def test_ranks_disagree_on_the_size_of_the_exchange_unchecked(what: str) -> None:
    """gloo ends the rank that is sent more than it expects. The other may come to an end, with numbers of nothing."""
    outcomes = run_ranks("scenarios.disagrees", what=what, checked=False)
    longer = 0 if what == "fewer rows" else 1
    shorter = outcomes[1 - longer]
    assert shorter.status == _ABORTED, outcomes
    assert "Received data size doesn't match expected size" in shorter.log
    other = outcomes[longer]
    assert other.status == 0, outcomes
    assert other.seen["error"] in (None, "RuntimeError"), outcomes
    assert not _is_right(other.seen), "it is told of no error, and right: the docs say otherwise"


def test_ranks_disagree_on_the_width_unchecked() -> None:
    """Nothing shows that the shards do not fit together: no error, and wrong numbers on every rank."""
    for outcome in run_ranks("scenarios.disagrees", what="width", checked=False):
        assert outcome.status == 0, outcome
        assert outcome.seen["error"] is None, outcome
        assert not outcome.seen["wrong"] < 1e-2, outcome


@pytest.mark.parametrize("what", ["bfloat16", "lse"])
def test_ranks_disagree_on_what_the_exchange_does_not_show_unchecked(what: str) -> None:
    """Statistics are float32 of either dtype, and the lse needs none of its own: the right numbers on every rank."""
    for outcome in run_ranks("scenarios.disagrees", what=what, checked=False):
        assert outcome.status == 0, outcome
        assert outcome.seen["error"] is None, outcome
        assert outcome.seen["wrong"] < 1e-6, outcome
        assert outcome.seen["wrong_grad"] < (2e-3 if what == "bfloat16" else 1e-6), outcome


@pytest.mark.parametrize("implementation", ["te_ce", "te_ce_linear"])
@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
def test_a_rank_fails_alone(checked: bool, implementation: str) -> None:
    """In a model of Megatron's. Afterwards the patch can be taken back, and applied again over a new group."""
    waiting, failed = run_ranks("megatron_scenarios.fails_alone", checked=checked, implementation=implementation)
    _error(failed, "ValueError", "target: expected shape")
    if checked:
        _error(waiting, "RuntimeError", "but rank 1 raised ValueError: target: expected shape")
    else:
        _error(waiting, "RuntimeError", "Timed out waiting", TIMEOUT_S + SLACK_S)
        assert waiting.seen["seconds"] > TIMEOUT_S - 1.0
    for outcome in (waiting, failed):
        assert outcome.seen["parameters_kept"]
        assert outcome.seen["reverted"]
        assert outcome.seen["served"] == 1
        assert outcome.seen["wrong_after"] < 1e-5
        assert outcome.seen["loss_after"] == outcome.seen["loss_before"]


def test_ranks_differ_in_their_path() -> None:
    """An error every time, not only the first."""
    for outcome in run_ranks("megatron_scenarios.differ_in_their_path"):
        assert outcome.status == 0, outcome
        for seen in outcome.seen["different"]:
            assert seen["error"] == "RuntimeError", outcome
            assert re.search(r"ranks \[0\] of the .* group fuse .* ranks \[1\] compute it on logits", seen["message"])
        assert outcome.seen["alike"]["error"] is None, outcome


@pytest.mark.parametrize("world", [False, True], ids=["new_group", "world"])
def test_a_destroyed_group(world: bool) -> None:
    for outcome in run_ranks("scenarios.hands_over_a_destroyed_group", world=world):
        _error(outcome, "ValueError", "^group: expected a process group in use, got one that was destroyed", 1.0)
        assert outcome.seen["collectives"] == 0
