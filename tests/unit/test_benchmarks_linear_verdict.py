"""The benchmark of the fused linear + loss: ratios are taken within rounds, promises can be broken."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from benchmarks.linear import providers, results, rounds, verdict
from benchmarks.linear.floors import FOUR, THREE
from benchmarks.measure import Stopwatch
from benchmarks.results import Row

CPU = torch.device("cpu")


def test_ratios_are_taken_within_rounds() -> None:
    # The second round is twice as slow for everybody; medians of all times would say 1.5.
    assert rounds.ratio([2.0, 6.0, 3.0], [1.0, 3.0, 2.0]) == 2.0
    row = results.timed({"provider": "a"}, {"a": [2.0, 6.0, 3.0], THREE: [1.0, 3.0, 2.0], FOUR: [2.0, 6.0, 3.0]})
    assert (row["ms"], row["x_three"], row["x_four"]) == (3.0, 2.0, 1.0)
    assert results.samples_of(row) == [2.0, 6.0, 3.0]


def test_everybody_is_timed_in_every_round_in_changing_order() -> None:
    called: list[str] = []

    def function(name: str) -> rounds.Timed:
        return lambda _: called.append(name)

    names = ["a", "b", "c", "d"]
    samples = rounds.take_turns({name: function(name) for name in names}, Stopwatch(CPU, 2), 6)
    assert {name: len(times) for name, times in samples.items()} == dict.fromkeys(names, 6)
    turns = [called[start : start + 8 : 2] for start in range(0, len(called), 8)]
    assert called[::2] == called[1::2]
    assert all(sorted(turn) == names for turn in turns)
    followers = {pair for turn in turns for pair in itertools.pairwise(turn)}
    assert len(followers) > 6


def _rows(times: dict[str, float], **more: Any) -> list[Row]:
    shape = verdict.MEMORY_SHAPE._asdict()
    return [
        {"provider": name, "status": "ok", "samples": f"{ms} {2 * ms}", "run": "1", **shape, **more}
        for name, ms in times.items()
    ]


KEPT = {
    THREE: 36.0,
    FOUR: 50.0,
    providers.RECOMPUTE: 51.0,
    "te_ce keep=0.25": 48.0,
    "te_ce keep=0.5": 45.0,
    "te_ce keep=0.75": 42.0,
    providers.KEEP_ALL: 38.0,
    providers.TOKEN_WEIGHTS: 37.0,
    providers.QUACK: 40.0,
    providers.VERL: 75.0,
    providers.LIGER_CHUNKED: 94.0,
    providers.CCE: 98.0,
}


def test_promises_are_kept() -> None:
    found = verdict.verdicts(_rows(KEPT, extra_bytes=1.6 * 2**30))
    assert [each.kept for each in found] == [True] * 9
    assert found[0].measured == pytest.approx(51 / 50)


@pytest.mark.parametrize(
    ("name", "ms", "promise"),
    [
        (providers.RECOMPUTE, 52.5, "recompute over 4 GEMM"),
        (providers.KEEP_ALL, 39.0, "keep=1.0 over 3 GEMM"),
        (providers.TOKEN_WEIGHTS, 38.5, "token_weights over 3 GEMM"),
        (providers.QUACK, 36.9, "over quack"),
        (providers.VERL, 70.0, "verl over"),
        (providers.LIGER_CHUNKED, 88.0, "Liger"),
        (providers.CCE, 70.0, "CCE, filtered over"),
        # Keeping more that costs time.
        ("te_ce keep=0.5", 48.5, "keeping more"),
    ],
)
def test_promises_can_be_broken(name: str, ms: float, promise: str) -> None:
    found = verdict.verdicts(_rows({**KEPT, name: ms}, extra_bytes=1.6 * 2**30))
    broken = [each for each in found if each.kept is False]
    assert len(broken) == 1
    assert promise in broken[0].promise
    assert broken[0].cells()[-1] == "BROKEN"


def test_memory_is_promised_of_one_shape() -> None:
    found = verdict.verdicts(_rows(KEPT, extra_bytes=1.8 * 2**30))
    assert [each.promise for each in found if each.kept is False] == ["te_ce recompute, extra MiB"]
    others = [{**row, "rows": 4096} for row in _rows(KEPT, extra_bytes=1.8 * 2**30)]
    assert all(each.kept for each in verdict.verdicts(others))


def test_what_was_not_measured_in_the_same_run_is_not_judged() -> None:
    rows = _rows(KEPT)
    for row in rows:
        row["run"] = "2" if row["provider"] == providers.VERL else "1"
    rows = [row for row in rows if row["provider"] != "te_ce keep=0.5"]
    unknown = {each.promise for each in verdict.verdicts(rows) if each.kept is None}
    assert unknown == {
        "verl over te_ce recompute",
        "keeping more over keeping less, largest",
        "te_ce recompute, extra MiB",
    }
