"""The benchmark of the fused linear + loss: everybody is measured or named, wrong gradients are refused."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import report
from benchmarks.linear import command, providers, results, trial
from benchmarks.linear.chunked import TOKENS, chunked_linear_cross_entropy
from benchmarks.linear.floors import FOUR, THREE
from benchmarks.linear.problem import Problem, Shape, Truth
from benchmarks.results import Row

CPU = torch.device("cpu")
GPU_ONLY = ["Liger FLCE", f"Liger's own fallback, {TOKENS} tokens", "CCE, exact", "quack chunked", "verl"]


@pytest.fixture(autouse=True)
def _small_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_CE_BACKEND", "torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _run(folder: Path, *more: str) -> dict[str, Row]:
    rows = command.main(["--shapes", "24x16x96", "--rounds", "2", "--out", str(folder), *more])
    return {row["provider"]: row for row in rows}


def _add_provider(
    monkeypatch: pytest.MonkeyPatch, name: str, mean: providers.Loss, bound: float = providers._BOUND
) -> None:
    loaded = providers.Provider(name, "1.2.3", mean, None, bound)
    monkeypatch.setitem(providers.LOADERS, name, lambda name: loaded)


def _with_gradients(change: Callable[[Tensor], Tensor]) -> providers.Loss:
    """A right loss whose gradient of the logits went through `change`."""

    def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        logits.register_hook(change)
        return F.cross_entropy(logits, target)

    return mean


def test_everybody_who_runs_here_is_measured_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _run(tmp_path)
    said = capsys.readouterr()
    usual = [name for name in providers.LOADERS if name not in providers.SLOW_TO_START]
    assert list(found) == [THREE, FOUR, *usual]
    for name in [*providers.KEEPS, providers.TOKEN_WEIGHTS, providers.TORCH, providers.CHUNKED]:
        assert found[name]["status"] == "ok", found[name]
        assert found[name]["ms"] > 0
        assert 0 < found[name]["weighted_dw_error"] < 2**-6
    for name in GPU_ONLY:
        assert (found[name]["status"], found[name]["note"]) == ("skipped", "runs on CUDA devices alone")
        assert "ms" not in found[name]
    assert "verl over te_ce recompute" in said.out
    assert "not measured" in said.out
    with (tmp_path / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == results.COLUMNS
    for line in lines:
        assert all(line[name] for name in ("device", "torch", "commit", "command", "rounds", "run")), line
        assert str(tmp_path) not in "".join(line.values())


def test_missing_peers_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(providers, "_needs_cuda", lambda: None)
    for package in ("liger_kernel", "cut_cross_entropy", "quack", "verl"):
        monkeypatch.setitem(sys.modules, package, None)
    found = _run(tmp_path, "--providers", *GPU_ONLY)
    for name in GPU_ONLY:
        assert found[name]["status"] == "missing"
        assert "Error" in found[name]["note"]


def test_packages_are_imported_without_their_initialisation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inner = tmp_path / "heavy" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").write_text("raise RuntimeError('initialised')")
    (inner / "kernels.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        providers._without_initialisation(["heavy", "heavy.inner"])
        from heavy.inner.kernels import answer  # type: ignore[import-not-found]

        assert answer == 42
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "heavy"]:
            del sys.modules[name]


def _targets_alone(gradient: Tensor) -> Tensor:
    return torch.where(gradient < 0, gradient, 0.0)


# Every bound refuses them, but that of who leaves small entries out: it cannot tell a third more.
@pytest.mark.parametrize(
    ("change", "bound"),
    [
        (_targets_alone, providers._FILTERED_BOUND),
        (lambda gradient: 2 * gradient, providers._FILTERED_BOUND),
        (lambda gradient: gradient.roll(1, dims=1), providers._FILTERED_BOUND),
        (lambda gradient: gradient * torch.nan, providers._FILTERED_BOUND),
        # Right for the loss itself: a provider that forgets the upstream gradient.
        (lambda gradient: gradient / 0.75, providers._COARSE_BOUND),
    ],
    ids=["targets alone", "doubled", "shifted", "nan", "upstream forgotten"],
)
def test_a_wrong_gradient_is_refused_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Callable[[Tensor], Tensor], bound: float
) -> None:
    _add_provider(monkeypatch, "wrong", _with_gradients(change), bound)
    _add_provider(monkeypatch, "right", _with_gradients(lambda gradient: gradient))
    found = _run(tmp_path, "--providers", "wrong", "right")
    assert found["wrong"]["status"] == "failed"
    assert "wrong against float64: d" in found["wrong"]["note"]
    assert "ms" not in found["wrong"]
    assert found["right"]["status"] == "ok"
    assert found["right"]["ms"] > 0


# The coarse bound, of gradients that are accumulated in 16 bits, must refuse as much.
@pytest.mark.parametrize("bound", [providers._BOUND, providers._COARSE_BOUND])
@pytest.mark.parametrize("name", ["weights ignored", "loss off by one percent"])
def test_wrong_token_weights_and_losses_are_refused(bound: float, name: str) -> None:
    def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), target)

    def wrong(hidden: Tensor, weight: Tensor, target: Tensor, token_weights: Tensor) -> Tensor:
        loss = F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="none")
        if name == "weights ignored":
            return loss.sum() + ((token_weights - 1) * loss.detach()).sum()
        return (loss * token_weights).sum() * 1.01

    problem = Problem(Shape(24, 16, 96), torch.bfloat16, CPU, 1.28)
    provider = providers.Provider("wrong", "1", mean, wrong, bound)
    with pytest.raises(trial.WrongAnswer, match="of token weights is off by"):
        trial.Trial(provider, problem).check(Truth(problem))


def test_the_truth_is_that_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.linear import problem as module

    # Chunks of five rows, the last one shorter; weights compared seven rows at a time.
    monkeypatch.setattr(module, "_CHUNK_BYTES", 5 * 8 * 96)
    monkeypatch.setattr(module, "_COMPARED_ROWS", 7)
    problem = Problem(Shape(24, 16, 96), torch.bfloat16, CPU, 1.28)
    truth = Truth(problem)
    hidden, weight = (each.detach().double().requires_grad_() for each in (problem.hidden, problem.weight))
    loss = F.cross_entropy(hidden @ weight.T, problem.target, reduction="none")
    torch.testing.assert_close(truth.loss, loss.detach())
    for total, errors_of in (
        (loss.mean() * 0.75, truth.errors_of_mean),
        ((loss * problem.token_weights).sum(), truth.errors_of_weighted),
    ):
        gradients = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
        value = loss.mean() if errors_of == truth.errors_of_mean else total
        assert max(errors_of(value, *gradients)) < 1e-6
        assert max(errors_of(value + 10, *(2 * each for each in gradients))) > 0.9


def test_the_chunked_baseline_is_right_over_several_chunks() -> None:
    rows = 2 * TOKENS + 3
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    target, upstream = torch.randint(40, (rows,)), torch.rand(rows)
    expected = F.cross_entropy(hidden @ weight.T, target, reduction="none")
    loss = chunked_linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(loss, expected)
    got, right = (torch.autograd.grad(each, (hidden, weight), upstream) for each in (loss, expected))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_the_report_has_tables_verdicts_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Memory is measured on GPUs only.
    memory = iter(range(1, 100))
    monkeypatch.setattr(trial.Trial, "memory", lambda self: {"extra_bytes": float(next(memory) << 20)})
    _run(tmp_path)
    report.main([str(tmp_path)])
    text = (tmp_path / "README.md").read_text()
    (picture,) = tmp_path.glob("*.png")
    assert picture.name == "linear_24x16x96_bfloat16.png"
    assert picture.stat().st_size > 1000
    for expected in (f"]({picture.name})", "## 24x16x96 bfloat16", "| te_ce recompute |", "| verl over te_ce"):
        assert expected in text
    assert "python -m benchmarks.linear --shapes 24x16x96 --rounds 2" in text
    assert "- Liger FLCE" in text
    assert str(tmp_path) not in text


def test_shapes_of_which_only_memory_counts_need_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = command.main(["--shapes", "--memory", "24x16x96", "--out", str(tmp_path)])
    assert rows == []
    assert "24x16x96: memory is measured on GPUs alone" in capsys.readouterr().err


def test_memory_alone_is_measured_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "on_gpu", lambda device: True)
    monkeypatch.setattr(trial.Trial, "memory", lambda self: {"extra_bytes": float(3 << 20)})
    names = ["--providers", providers.RECOMPUTE, providers.TORCH]
    shapes = ["--shapes", "24x16x96", "--memory", "24x16x96", "48x16x96"]
    rows = command.main([*shapes, *names, "--rounds", "2", "--out", str(tmp_path)])
    assert [(row["rows"], "ms" in row) for row in rows] == [*[(24, True)] * 4, *[(48, False)] * 2]
    assert {row["extra_bytes"] for row in rows[4:]} == {3 << 20}
    report.main([str(tmp_path)])
    timed, memory = (tmp_path / "README.md").read_text().split("## 48x16x96 bfloat16")
    assert "promise" in timed
    assert "promise" not in memory
    assert "| te_ce recompute | - | - | - | 3 |" in memory


@pytest.mark.parametrize("text", ["8x8", "8x8x8x8", "0x8x8", "axbxc"])
def test_bad_shapes_are_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--shapes", text, "--out", str(tmp_path)])
    assert "expected" in capsys.readouterr().err
