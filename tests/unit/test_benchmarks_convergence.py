"""The comparison of training runs: what is read, how far apart two runs are, what the report says of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.convergence import curves, gradients, report, runs
from benchmarks.convergence.runs import Run

STEPS = 120
_HEADER = "run,step,train_loss,gradient_norm,held_out_loss,learning_rate,tokens_per_second,peak_memory_mib"


def _write(folder: Path, run: Run, shift: float, steps: int = STEPS) -> None:
    """A run whose losses are `shift` above 5 - step / 100, and that logged every 40 steps."""
    lines = [_HEADER]
    for step in range(1, steps + 1):
        lines.append(f"x,{step},{5 - step / 100 + shift},{2 + shift},,,,")
        if step % 40 == 0:
            lines.append(f"x,{step},,,,0.001,{1000 * (step // 40)},{500 + shift}")
    lines.append(f"x,{steps},,,{4 + shift},,,")
    own = folder / run.name.replace(" ", "_")
    own.mkdir(parents=True)
    (own / "metrics.csv").write_text("\n".join(lines) + "\n")
    words = "torchrun train.global_batch_size=4 model.seq_length=50"
    (own / runs.ABOUT).write_text(json.dumps({**run._asdict(), "ranks": 1, "command": words, "model": "model: tiny"}))


def test_every_loss_once_and_the_first_twice_more() -> None:
    assert runs.planned(["a", "b"], 1, 2) == [Run("a", 1), Run("b", 1), Run("a", 1, again=True), Run("a", 2)]
    assert runs.planned(["a", "b"], 1, None) == [Run("a", 1), Run("b", 1)]


def test_what_is_read(tmp_path: Path) -> None:
    _write(tmp_path, Run("unfused", 1), 0.0)
    (curve,) = curves.read(tmp_path)
    assert curve.run == Run("unfused", 1)
    assert curve.train[:2] == (4.99, 4.98)
    assert len(curve.train) == len(curve.norms) == STEPS
    assert curve.held_out == ((STEPS, 4.0),)
    assert curve.tokens_per_second == (2000.0, 3000.0)  # the first stretch is left out
    assert (curve.speed, curve.peak_mib, curve.model) == (2500.0, 500.0, "model: tiny")


@pytest.mark.parametrize("lengths", [[], [10, 12]])
def test_what_cannot_be_compared(tmp_path: Path, lengths: list[int]) -> None:
    for seed, steps in enumerate(lengths):
        _write(tmp_path, Run("unfused", seed), 0.0, steps)
    with pytest.raises(ValueError, match="expected"):
        curves.read(tmp_path)


def test_mean_of_a_window() -> None:
    assert curves.smoothed([1.0, 2.0, 4.0, 8.0], 2) == [1.5, 3.0, 6.0]
    assert curves.smoothed([1.0, 3.0], 50) == [2.0]


@pytest.mark.parametrize(("shift", "verdict"), [(0.01, "yes"), (-0.2, "NO")])
def test_report(tmp_path: Path, shift: float, verdict: str) -> None:
    """A run is judged by the distance of another seed's, 0.1."""
    for run, by in ((Run("unfused", 1), 0.0), (Run("unfused", 2), 0.1), (Run("te_ce", 1), shift)):
        _write(tmp_path, run, by)
    text = report.write(tmp_path, "unfused").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    cells = [cell.strip() for cell in rows["te_ce 1"].split("|")]
    assert cells[4] == cells[5] == cells[6] == f"{abs(shift):.1e}"
    assert cells[7] == f"{abs(shift) / 2:.1e}"
    assert cells[8:11] == ["80.0", f"{500 + shift:.0f}", verdict]  # 200 tokens at 2500 a second
    assert "yes" not in rows["unfused 2"]
    assert "NO" not in rows["unfused 2"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_reference(tmp_path: Path) -> None:
    _write(tmp_path, Run("te_ce", 1), 0.0)
    with pytest.raises(ValueError, match="expected a run of unfused, found te_ce 1"):
        report.write(tmp_path, "unfused")


def _script(tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(body)
    monkeypatch.setattr(runs, "_SCRIPT", script)


def test_runs_are_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import os, sys\nprint('model: of', os.environ['WORLD_SIZE'], 'ranks', *sys.argv[1:])"
    _script(tmp_path, body, monkeypatch)
    runs.execute([Run("te_ce", 7)], tmp_path / "out", 1, 2, ["train.steps=3"])
    about = json.loads((tmp_path / "out" / "te_ce_7" / runs.ABOUT).read_text())
    assert about["model"].startswith("model: of 1 ranks loss.implementation=te_ce train.seed=7 ")
    assert about["model"].endswith(" train.steps=3")
    assert about["command"].endswith("train.steps=3 loss.implementation=te_ce train.seed=7")


def test_a_failed_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _script(tmp_path, "raise SystemExit('out of luck')", monkeypatch)
    with pytest.raises(RuntimeError, match=r"te_ce 7: ended with 1: .*out of luck"):
        runs.execute([Run("te_ce", 7)], tmp_path / "out", 1, 1, [])


def test_distances_of_gradients() -> None:
    reference = {"a": torch.ones(4), "b": torch.full((9,), 2.0), "c": torch.zeros(2)}
    ours = {"a": torch.ones(4), "b": torch.full((9,), 2.5), "c": torch.tensor([0.0, 3.0])}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = gradients._distances(ours, reference)
    finally:
        dist.destroy_process_group()
    assert found == {"median": "2.50e-01", "largest": "3.00e+00", "of": "c", "tensors": 3}


def test_the_norm_of_runs_without_clipping(tmp_path: Path) -> None:
    _write(tmp_path, Run("unfused", 1), 0.0)
    (curve,) = curves.read(tmp_path)
    bare = curves.Curve(**{**vars(curve), "norms": ()})
    assert math.isnan(curves.distance(bare, curve).norms)
