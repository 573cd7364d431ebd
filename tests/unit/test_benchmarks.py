"""The benchmarks themselves: wrong providers are refused, missing ones named, overwritten logits restored."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import compare, logits, measure, plots, providers, report, results, tp
from benchmarks.measure import Bandwidth, Stopwatch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_CE_BACKEND", "torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in (logits, tp):
        monkeypatch.setattr(module, "ceilings", lambda device: Bandwidth(4e9, 5e9))


def _add_provider(monkeypatch: pytest.MonkeyPatch, name: str, loss: providers.Loss, **fields: Any) -> None:
    loaded = providers.Provider(name, lambda case, group: loss, "1.2.3", **fields)
    monkeypatch.setitem(providers.LOADERS, name, lambda name: loaded)


def _run(folder: Path, names: list[str], *more: str, shape: str = "8x48") -> dict[str, results.Row]:
    rows = logits.main(["--shapes", shape, "--runs", "2", "--out", str(folder), "--providers", *names, *more])
    return {row["provider"]: row for row in rows if row["option"] == "plain"}


def _with_gradient(change: Callable[[Tensor, Tensor], Tensor]) -> providers.Loss:
    """A right loss whose gradient went through `change(gradient, target)`."""

    def loss(x: Tensor, target: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.clone()
            x.register_hook(lambda gradient: change(gradient, target))
        return F.cross_entropy(x.float(), target, reduction="none")

    return loss


def _targets_only(gradient: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(gradient).scatter(1, target[:, None], gradient.gather(1, target[:, None]))


# The first is within the bound when a norm is taken over all columns together, for so many of them.
@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (_targets_only, "2x131072"),
        (lambda gradient, target: 2 * gradient, "8x48"),
        (lambda gradient, target: gradient.roll(1, dims=1), "8x48"),
        (lambda gradient, target: gradient * torch.nan, "8x48"),
    ],
    ids=["targets only", "doubled", "shifted", "nan"],
)
def test_a_wrong_gradient_is_refused_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Callable[[Tensor, Tensor], Tensor], shape: str
) -> None:
    _add_provider(monkeypatch, "wrong", _with_gradient(change))
    _add_provider(monkeypatch, "right", _with_gradient(lambda gradient, target: gradient))
    found = _run(tmp_path, ["wrong", "right"], shape=shape)
    assert found["wrong"]["status"] == "failed"
    assert "gradient error" in found["wrong"]["note"]
    assert "both_ms" not in found["wrong"]
    assert not found["wrong"]["gradient_error"] <= compare.GRADIENT_BOUND[torch.bfloat16]
    assert found["right"]["status"] == "ok"
    assert found["right"]["both_ms"] > 0


def test_a_wrong_loss_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), target, reduction="none") + 0.1

    _add_provider(monkeypatch, "wrong", loss)
    row = _run(tmp_path, ["wrong"])["wrong"]
    assert row["status"] == "failed"
    assert row["loss_error"] > compare.LOSS_BOUND[torch.bfloat16]


def test_a_provider_that_raises_has_a_row_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def raises(error: Exception) -> providers.Loss:
        def loss(x: Tensor, target: Tensor) -> Tensor:
            raise error

        return loss

    _add_provider(monkeypatch, "broken", raises(RuntimeError("kernel in /opt/some/where.py failed\nand more")))
    _add_provider(monkeypatch, "large", raises(torch.OutOfMemoryError("tried to allocate 9 GiB")))
    found = _run(tmp_path, ["broken", "large", "te_ce"])
    assert (found["broken"]["status"], found["broken"]["note"]) == ("failed", "RuntimeError: kernel in failed")
    assert found["large"]["status"] == "out of memory"
    assert found["te_ce"]["status"] == "ok"


def test_missing_peers_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("quack", "liger_kernel"):
        monkeypatch.setitem(sys.modules, package, None)
    found = _run(tmp_path, ["te_ce", "quack", "Liger"])
    said = capsys.readouterr()
    for name in ("quack", "Liger"):
        assert found[name]["status"] == "missing"
        assert "ModuleNotFoundError" in found[name]["note"]
        assert f"{name}: missing: ModuleNotFoundError" in said.err
        assert f"{name}: missing: ModuleNotFoundError" in said.out


def test_hidden_packages_cannot_be_imported_and_come_back() -> None:
    import json.decoder

    with providers._hidden("json"), pytest.raises(ImportError):
        import json.scanner
    assert sys.modules["json.decoder"] is json.decoder


def test_options_are_measured_beside_the_plain_case(tmp_path: Path) -> None:
    names = ["te_ce", "te_ce, new buffer", "torch eager"]
    command = ["--shapes", "64x48", "--runs", "2", "--out", str(tmp_path), "--providers", *names]
    rows = logits.main([*command, "--label-smoothing", "0.1", "--ignored", "0.3", "--padding", "5"])
    assert [row["option"] for row in rows[::3]] == ["plain", "label_smoothing=0.1", "ignored=0.3", "padding=5"]
    assert {row["status"] for row in rows} == {"ok"}


def test_what_a_provider_does_not_support_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _add_provider(monkeypatch, "plain only", _with_gradient(lambda gradient, target: gradient))
    command = ["--shapes", "8x48", "--runs", "2", "--out", str(tmp_path), "--providers", "plain only"]
    plain, ignored = logits.main([*command, "--ignored", "0.5"])
    assert plain["status"] == "ok"
    assert (ignored["status"], ignored["note"]) == ("unsupported", "has no ignored")


def test_the_csv_has_the_promised_columns_and_is_continued(tmp_path: Path) -> None:
    for _ in range(2):
        _run(tmp_path, ["te_ce", "torch eager"])
    with (tmp_path / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4
    assert list(lines[0]) == results.COLUMNS
    promised = {"device", "torch", "triton", "version", "commit", "copy_GBs", "read_GBs", "fwd_ms", "bwd_ms", "both_ms"}
    promised |= {"eager_ms", "host_us", "share_fwd", "share_both", "loss_error", "gradient_error"}
    for line in lines:
        assert all(line[name] for name in promised), line
        assert str(tmp_path) not in "".join(line.values())
    assert len(results.read(tmp_path / "results.csv")) == 2


def test_a_csv_of_other_columns_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("provider,time\n")
    with pytest.raises(ValueError, match=r"results\.csv: expected the columns .* another --out"):
        results.Writer(tmp_path / "results.csv")


def test_plots_and_report_are_written_from_the_csv(tmp_path: Path) -> None:
    command = ["--shapes", "8x48", "8x96", "16x96", "--runs", "2", "--out", str(tmp_path)]
    logits.main([*command, "--providers", "te_ce", "torch eager"])
    # Memory is measured on GPUs only.
    rows = results.read(tmp_path / "results.csv")
    writer = results.Writer(tmp_path / "results.csv")
    for row in rows:
        writer.write({**{name: row[name] for name in results.COLUMNS}, "extra_bytes": 4096.0, "extra": 1.0})
    writer.close()
    report.main([str(tmp_path)])
    text = (tmp_path / "README.md").read_text()
    names = [picture.name for picture in plots.draw(tmp_path)]
    assert sorted(names) == sorted(
        f"logits_bfloat16_{quantity}_by_{axis}.png"
        for quantity in ("time", "memory")
        for axis in ("vocabulary", "rows")
    )
    for name in names:
        assert f"]({name})" in text
        assert (tmp_path / name).stat().st_size > 1000
    assert "| te_ce |" in text
    assert "python -m benchmarks.logits --shapes 8x48" in text
    assert str(tmp_path) not in text


def test_logits_are_restored_before_every_run() -> None:
    pristine = torch.arange(4.0)
    values = torch.zeros(4)

    def overwrite(_: None) -> None:
        assert torch.equal(values, pristine)
        values.zero_()

    watch = Stopwatch(CPU, 5)
    for time_ms in (watch.device_ms, watch.eager_ms):
        timing = time_ms(overwrite, lambda: measure.restore(values, pristine))
        assert 0 < timing.low <= timing.median <= timing.high


class _FakeCuda:
    """Stands in for the parts of torch.cuda that the stopwatch uses; writes down in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        log = self.log

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                log.append("event")

            def elapsed_time(self, other: Event) -> float:
                return 2.0

        class Graph:
            def replay(self) -> None:
                log.append("replay")

        @contextlib.contextmanager
        def graph(captured: Graph, capture_error_mode: str) -> Any:
            log.append("capture")
            yield

        class Stream:
            def wait_stream(self, other: object) -> None:
                log.append("wait")

        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": graph,
            "Stream": Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": Stream,
            "synchronize": lambda: log.append("synchronize"),
            "_sleep": lambda cycles: log.append("spin"),
            "reset_peak_memory_stats": lambda: None,
            "memory_allocated": lambda: 100,
            "max_memory_allocated": lambda: 164,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)
        for module in (measure, compare):
            monkeypatch.setattr(module, "on_gpu", lambda device: True)
        monkeypatch.setattr(measure, "FLUSH_BYTES", 16)
        measure._flush_buffer.cache_clear()


def test_a_run_on_a_gpu_is_restore_spin_event_function_event(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _FakeCuda(monkeypatch)
    watch = Stopwatch(CPU, 2, align=lambda: fake.log.append("align"))
    run: dict[str, Any] = {
        "function": lambda _: fake.log.append("function"),
        "prepare": lambda: fake.log.append("restore"),
    }
    assert watch.device_ms(**run) == (2.0, 2.0, 2.0)
    one_run = ["restore", "spin", "align", "event", "function", "event", "synchronize"]
    assert fake.log[-14:] == one_run * 2
    fake.log.clear()
    watch.eager_ms(**run)
    assert fake.log[-7:] == ["restore", "align", "synchronize", "event", "function", "event", "synchronize"]
    assert "spin" not in fake.log
    fake.log.clear()
    graph, _ = measure.capture(**run)
    assert fake.log.index("capture") == len(fake.log) - 2
    assert fake.log[-1] == "function"
    assert fake.log.count("restore") == measure.WARM_UP + 1
    graph.replay()


def test_a_row_of_a_gpu_has_memory_and_a_graph_or_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _FakeCuda(monkeypatch)

    def capture(function: Callable[[None], Any], prepare: Callable[[], None]) -> Any:
        prepare()
        outputs = function(None)
        return type("Graph", (), {"replay": lambda self: function(None)})(), outputs

    monkeypatch.setattr(compare, "capture", capture)
    eager = providers.LOADERS["torch eager"]
    waits = dataclasses.replace(eager("waits"), no_graph="it waits")
    monkeypatch.setitem(providers.LOADERS, "waits", lambda name: waits)
    found = _run(tmp_path, ["te_ce", "te_ce, new buffer", "waits"])
    for name in ("te_ce", "te_ce, new buffer"):
        assert found[name]["graph_ms"] == 2.0, found[name]["note"]
        assert found[name]["extra"] == 64 / (8 * 48 * 2)
    assert found["waits"]["note"] == "no graph: it waits"
    assert found["waits"]["both_ms"] == 2.0

    def fails(function: object, prepare: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(compare, "capture", fails)
    row = _run(tmp_path, ["te_ce"])["te_ce"]
    assert row["status"] == "ok"
    assert row["note"].startswith("no graph: RuntimeError: operation not permitted")
    assert "graph_ms" not in row


def test_ranks_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    command = ["--shapes", "8x48", "--runs", "2", "--out", str(tmp_path), "--providers", "te_ce", "te_ce, new buffer"]
    rows = tp.main(command)
    assert [(row["provider"], row["option"], row["status"]) for row in rows] == [
        ("te_ce", "plain", "ok"),
        ("te_ce, new buffer", "plain", "ok"),
        (tp.BARE, "plain", "ok"),
        ("te_ce", results.PROFILE, "ok"),
        ("te_ce, new buffer", results.PROFILE, "ok"),
    ]
    # One rank has nobody to talk to.
    assert rows[3]["collectives"] == 0
    report.write(tmp_path)
    assert "## Vocabulary over ranks" in (tmp_path / "README.md").read_text()


def test_tuning_ranks_by_relative_times() -> None:
    from benchmarks.tune import rank

    # Half a millisecond lost at the large vocabulary weighs less than a third lost at the small one.
    times = {("a",): {1000: 0.3, 100_000: 3.0}, ("b",): {1000: 0.2, 100_000: 3.5}}
    assert [candidate for _, candidate in rank(times)] == [("b",), ("a",)]
    assert rank(times)[0][0] == pytest.approx((3.5 / 3.0) ** 0.5)


def test_tuning_uses_the_candidate_and_puts_the_choice_back() -> None:
    from benchmarks.tune import CONSTANTS, chosen
    from te_ce.kernels import shapes

    for constant in CONSTANTS:
        for candidate in constant.candidates:
            before = shapes.walk_plan(constant.dtype, 70_000, 2, constant.smoothed)
            tile = shapes.gradient_tile(constant.dtype, 70_000)
            with chosen(constant, candidate):
                if constant.backward:
                    size, thread_bytes = candidate
                    elements, warps = shapes.gradient_tile(constant.dtype, 70_000)
                    assert (elements * constant.dtype.itemsize, size // (32 * warps)) == (size, thread_bytes)
                else:
                    assert shapes.walk_plan(constant.dtype, 70_000, 2, constant.smoothed).shape == candidate[0]
            assert shapes.walk_plan(constant.dtype, 70_000, 2, constant.smoothed) == before
            assert shapes.gradient_tile(constant.dtype, 70_000) == tile
