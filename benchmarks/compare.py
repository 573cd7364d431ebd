"""One provider on one problem: checked, then timed; and the loop over shapes, options and providers.

Useful passes over the logits: forward reads them once; forward and backward read, read and write, three passes. The
floor is their bytes over the measured bandwidth. A wrong loss or gradient is not timed: its row holds the errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks import providers as registry
from benchmarks.measure import Bandwidth, Stopwatch, Timing, bandwidth, capture, host_us, on_gpu, peak_extra_bytes
from benchmarks.problem import Case, Problem
from benchmarks.providers import Provider
from benchmarks.results import Row, Writer, as_text, reason, sources, tables

# One half of a unit in the last place of bfloat16 is 2^-9 of the value: Liger rounds each loss to the logits' dtype,
# Megatron's fused loss every gradient to bfloat16. Gradients of large vocabularies are subnormal in float16.
LOSS_BOUND = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-8, torch.float32: 1e-5}
GRADIENT_BOUND = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-6, torch.float32: 2.0**-7}
# Where the host's time is all there is.
TINY_ROWS, TINY_COLUMNS = 16, 512


class WrongAnswer(Exception):
    """A provider's loss or gradient is too far from float64; `errors` are the columns that say how far."""

    def __init__(self, errors: Row) -> None:
        loss, gradient = errors["loss_error"], errors["gradient_error"]
        super().__init__(f"wrong against float64: loss error {loss:.1e}, gradient error {gradient:.1e}")
        self.errors = errors


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all measurements of a run share."""

    kind: str
    watch: Stopwatch
    ceilings: Bandwidth
    group: ProcessGroup | None = None
    ranks: int = 1
    writes: bool = True
    graph: bool = True


class Trial:
    """The functions of one provider on one problem that are checked and timed."""

    def __init__(self, provider: Provider, problem: Problem, group: ProcessGroup | None) -> None:
        self.provider, self.problem = provider, problem
        self._loss = provider.make(problem.case, group)
        self._plain = problem.logits.detach()
        self._upstream = problem.upstream

    def inference(self, _: object = None) -> Tensor:
        """Forward alone."""
        with torch.no_grad():
            return self._loss(self._plain, self.problem.target)

    def forward(self) -> Tensor:
        """Forward that keeps what backward needs."""
        return self._loss(self.problem.logits, self.problem.target)

    def forward_afresh(self) -> Tensor:
        """The same, of restored logits."""
        self.problem.reset()
        return self.forward()

    def backward(self, loss: Tensor) -> Tensor:
        """Gradient [N, V_local] of the logits."""
        return torch.autograd.grad(loss, self.problem.logits, self._upstream)[0]

    def both(self, _: object = None) -> tuple[Tensor, Tensor]:
        """Forward and backward."""
        loss = self.forward()
        return loss.detach(), self.backward(loss)

    def check(self) -> tuple[float, float]:
        """Errors of loss and gradient for random upstream gradients; afterwards the dtype of these is settled."""
        loss = self.forward_afresh()
        # A loss that is a sum has one upstream gradient; timed is the one of a loss that nothing follows.
        self._upstream = loss.new_tensor(0.75) if self.provider.sums else self.problem.upstream.to(loss.dtype)
        errors = self.problem.errors(loss, self.backward(loss), self._upstream)
        if self.provider.sums:
            self._upstream = torch.ones_like(loss)
        return errors


def measure(provider: Provider, problem: Problem, setting: Setting) -> Row:
    """Errors, times and memory of one provider, as columns; raises `WrongAnswer` before anything is timed."""
    trial, watch = Trial(provider, problem, setting.group), setting.watch
    row: Row = {}
    row |= _refuse_wrong(trial, watch, *trial.check())
    timings = {
        "fwd": watch.device_ms(trial.inference, problem.reset),
        "bwd": watch.device_ms(trial.backward, trial.forward_afresh),
        "both": watch.device_ms(trial.both, problem.reset),
        "eager": watch.eager_ms(trial.both, problem.reset),
    }
    for name, timing in timings.items():
        row |= _columns(name, timing)
    row["share_fwd"] = problem.bytes / setting.ceilings.read / timings["fwd"].median * 1e3
    row["share_fwd_copy"] = problem.bytes / setting.ceilings.copy / timings["fwd"].median * 1e3
    row["share_both"] = 3 * problem.bytes / setting.ceilings.copy / timings["both"].median * 1e3
    if on_gpu(watch.device):
        row["extra_bytes"] = peak_extra_bytes(trial.both, problem.reset)
        row["extra"] = row["extra_bytes"] / problem.bytes
    # Last: a capture that fails can leave the allocator in a poor state.
    row["note"] = _measure_graph(row, trial, setting)
    return row


def _measure_graph(row: Row, trial: Trial, setting: Setting) -> str:
    """Add the times of a graph, or say why there are none."""
    if not on_gpu(setting.watch.device) or not setting.graph:
        return ""
    if trial.provider.no_graph:
        return f"no graph: {trial.provider.no_graph}"
    problem = trial.problem
    try:
        graph, (loss, gradient) = capture(trial.both, problem.reset)
        problem.reset()
        graph.replay()
        _refuse_wrong(trial, setting.watch, *problem.errors(loss, gradient, trial._upstream))
        row |= _columns("graph", setting.watch.eager_ms(lambda _: graph.replay(), problem.reset))
    except Exception as error:
        return f"no graph: {reason(error)}"
    return ""


def _refuse_wrong(trial: Trial, watch: Stopwatch, loss_error: float, gradient_error: float) -> Row:
    """The errors as columns, the largest of all ranks; raises where they are out of bounds."""
    errors = dict(zip(("loss_error", "gradient_error"), watch.slowest([loss_error, gradient_error]), strict=True))
    dtype = trial.problem.case.dtype
    # Not the other way round: NaN is refused.
    if not (errors["loss_error"] <= LOSS_BOUND[dtype] and errors["gradient_error"] <= GRADIENT_BOUND[dtype]):
        raise WrongAnswer(errors)
    return errors


def _columns(name: str, timing: Timing) -> Row:
    return {f"{name}_ms": timing.median, f"{name}_low": timing.low, f"{name}_high": timing.high}


def attempt(provider: Provider, problem: Problem, setting: Setting) -> Row:
    """`measure`, with whatever it raises as a row that says so."""
    lacking = provider.lacks(problem.case, setting.group)
    if lacking:
        return {"status": "unsupported", "note": f"has no {', '.join(lacking)}"}
    try:
        return {"status": "ok", **measure(provider, problem, setting)}
    except WrongAnswer as error:
        return {"status": "failed", "note": str(error), **error.errors}
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "note": reason(error)}
    except Exception as error:
        return {"status": "failed", "note": reason(error)}


def ceilings(device: torch.device) -> Bandwidth:
    """The bandwidths of this device, also on stderr."""
    found = bandwidth(device)
    _say(f"copy {found.copy / 1e9:.0f} GB/s, read {found.read / 1e9:.0f} GB/s")
    release()
    return found


def run(arguments: argparse.Namespace, command: list[str], setting: Setting) -> list[Row]:
    """Measure everything that was asked for; rows go to results.csv as they come, and tables to stdout at the end."""
    say = _say if setting.writes else lambda text: None
    found, missing = registry.load(arguments.providers)
    for name, why in missing.items():
        say(f"{name}: missing: {reason(why)}")
    device = setting.watch.device
    common = sources(device, setting.ceilings, arguments.runs, command, f"benchmarks.{setting.kind}", arguments.commit)
    common |= {"kind": setting.kind, "ranks": setting.ranks, "dtype": arguments.dtype}
    writer = Writer(arguments.out / "results.csv") if setting.writes else None
    hosts = {name: _host_time(provider, arguments, setting) for name, provider in found.items()}
    rows: list[Row] = []
    for case, first in _cases(arguments):
        if first:
            registry.forget_compiled()
        for row in _rows(case, arguments, found, missing, setting):
            provider = found.get(row["provider"])
            if provider:
                row |= {"version": provider.version, "overwrites": provider.overwrites, "host_us": hosts[provider.name]}
            rows.append({**common, "rows": case.rows, "columns": case.columns, "option": case.option, **row})
            if writer:
                writer.write(rows[-1])
            if provider:
                say(_progress(rows[-1]))
    if writer:
        writer.close()
        for title, cells, notes in tables(rows):
            print("\n".join(["", title, as_text(cells), *notes]), flush=True)
    return rows


def _cases(arguments: argparse.Namespace) -> Iterator[tuple[Case, bool]]:
    """Each shape plain, then with each option that was given; and whether a case is the first of its shape."""
    dtype = getattr(torch, arguments.dtype)
    for rows, columns in arguments.shapes:
        plain = Case(rows, columns, dtype)
        yield plain, True
        for name in ("label_smoothing", "ignored", "padding"):
            if value := getattr(arguments, name):
                yield dataclasses.replace(plain, **{name: value}), False


def _rows(
    case: Case, arguments: argparse.Namespace, found: dict[str, Provider], missing: dict[str, str], setting: Setting
) -> Iterator[Row]:
    try:
        problem: Problem | None = Problem(case, setting.watch.device, setting.group)
    except (torch.OutOfMemoryError, ValueError) as error:
        problem, why = None, reason(error)
    for name in arguments.providers:
        if name in arguments.skip or f"{name}@{case.rows}x{case.columns}" in arguments.skip:
            row = {"status": "skipped", "note": "asked for by --skip"}
        elif name in missing:
            row = {"status": "missing", "note": reason(missing[name])}
        elif problem is None:
            row = {"status": "failed", "note": why}
        else:
            row = attempt(found[name], problem, setting)
            release()
        yield {"provider": name, **row}


def _host_time(provider: Provider, arguments: argparse.Namespace, setting: Setting) -> float | None:
    """Host microseconds of a forward and backward of a tiny problem; None where that fails, as its rows will say."""
    case = Case(TINY_ROWS, TINY_COLUMNS * setting.ranks, getattr(torch, arguments.dtype))
    if provider.name in arguments.skip or provider.lacks(case, setting.group):
        return None
    try:
        trial = Trial(provider, Problem(case, setting.watch.device, setting.group), setting.group)
        trial.check()
        return host_us(trial.both, setting.watch.device)
    except Exception:
        return None
    finally:
        release()


def release() -> None:
    """Give unused memory back to the device: the next provider starts with all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _progress(row: Row) -> str:
    where = f"{row['rows']}x{row['columns']} {row['dtype']} {row['option']}: {row['provider']}"
    if row["status"] != "ok":
        return f"{where}: {row['status']}: {row['note']}"
    note = f" ({row['note']})" if row["note"] else ""
    return f"{where}: fwd {row['fwd_ms']:.3f} bwd {row['bwd_ms']:.3f} both {row['both_ms']:.3f} ms{note}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
