"""The fused linear + loss, one process: `python -m benchmarks.linear [--shapes 8192x4096x128256 ...] [--out DIR]`.

Every provider's loss and gradients are checked against float64 and its memory is measured; then all of them and the
GEMMs they cannot do without are timed in turn, forward and backward of the mean loss. A wrong one is not timed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import providers as registry
from benchmarks import results as shared
from benchmarks.linear import results
from benchmarks.linear.floors import FOUR, THREE, Floors
from benchmarks.linear.problem import Problem, Shape, Truth
from benchmarks.linear.providers import LOADERS, SLOW_TO_START, Provider, load
from benchmarks.linear.rounds import Timed, take_turns
from benchmarks.linear.trial import Trial, WrongAnswer
from benchmarks.linear.verdict import NAMES, verdicts
from benchmarks.measure import Stopwatch, on_gpu
from benchmarks.results import Row, as_text, reason

# Output layers of Llama 3 8B and Qwen3-30B-A3B, and a round one.
GPU_SHAPES = ["8192x4096x128256", "8192x2048x151936", "4096x4096x131072"]
CPU_SHAPES = ["64x32x1024"]
# A standard deviation of 0.02, the usual initialisation, makes such logits of 4096 hidden units.
SPREAD = 1.28


def main(command: list[str] | None = None) -> list[Row]:
    """Run the command line; the rows are also returned."""
    command = sys.argv[1:] if command is None else command
    found_gpu = torch.cuda.is_available()
    arguments = _parser(found_gpu).parse_args(command)
    device = torch.device("cuda", torch.cuda.current_device()) if found_gpu else torch.device("cpu")
    common = shared.sources(device, None, arguments.runs, command, "benchmarks.linear", arguments.commit)
    common |= {"kind": "linear", "dtype": arguments.dtype, "rounds": arguments.rounds, "spread": arguments.spread}
    common["run"] = uuid.uuid4().hex[:8]
    started_here = not dist.is_initialized()
    try:
        return _run(arguments, Stopwatch(device, arguments.runs), common)
    finally:
        # A provider may have made a process group.
        if started_here and dist.is_initialized():
            dist.destroy_process_group()


def _run(arguments: argparse.Namespace, watch: Stopwatch, common: Row) -> list[Row]:
    """Every shape in turn: its rows go to results.csv and its tables to stdout before the next one is measured."""
    found, absent = load(arguments.providers)
    for name, (_, why) in absent.items():
        _say(f"{name}: {reason(why)}")
    writer = shared.Writer(arguments.out / "results.csv", results.COLUMNS)
    session = _Session(arguments, watch, found, absent)
    rows: list[Row] = []
    # A shape that is timed has its memory measured too.
    memory = [shape for shape in arguments.memory if shape not in arguments.shapes]
    for shape, is_timed in [*((each, True) for each in arguments.shapes), *((each, False) for each in memory)]:
        group = [{**common, **shape._asdict(), **row} for row in session.measure(shape, is_timed)]
        for row in group:
            writer.write(row)
        _print(group, is_timed)
        rows += group
    writer.close()
    return rows


def _parser(found_gpu: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.linear", description=(__doc__ or "").splitlines()[0])
    shapes = [Shape.parse(text) for text in (GPU_SHAPES if found_gpu else CPU_SHAPES)]
    parser.add_argument("--shapes", nargs="*", type=Shape.parse, default=shapes, metavar="NxHxV")
    parser.add_argument(
        "--memory", nargs="+", type=Shape.parse, default=[], metavar="NxHxV", help="shapes of which only memory counts"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    usual = [name for name in LOADERS if name not in SLOW_TO_START]
    parser.add_argument("--providers", nargs="+", default=usual, choices=list(LOADERS), metavar="NAME")
    parser.add_argument("--skip", nargs="+", default=[], choices=list(LOADERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5 if found_gpu else 3, help="in each of which everybody is timed")
    parser.add_argument("--runs", type=int, default=12 if found_gpu else 1, help="of each function in a round")
    parser.add_argument("--spread", type=float, default=SPREAD, help="standard deviation of the logits")
    parser.add_argument("--commit", help="of the code that is measured, where git can't tell")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks_linear"), help="folder of results.csv")
    return parser


class _Session:
    """What all shapes of a run share."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        watch: Stopwatch,
        found: dict[str, Provider],
        absent: dict[str, tuple[str, str]],
    ) -> None:
        self._arguments, self._watch, self._found, self._absent = arguments, watch, found, absent

    def measure(self, shape: Shape, is_timed: bool) -> list[Row]:
        """A row of every provider that was asked for, floors first."""
        if not is_timed and not on_gpu(self._watch.device):
            _say(f"{shape}: memory is measured on GPUs alone")
            return []
        _start_afresh()
        arguments = self._arguments
        problem = Problem(shape, getattr(torch, arguments.dtype), self._watch.device, arguments.spread)
        truth = Truth(problem) if is_timed else None
        trials = {name: Trial(provider, problem) for name, provider in self._found.items()}
        rows = [self._row(name, trials.get(name), truth) for name in arguments.providers]
        if truth is None:
            return rows
        floors = Floors(problem, truth)
        functions: dict[str, Timed] = {THREE: floors.three, FOUR: floors.four}
        functions |= {row["provider"]: trials[row["provider"]].both for row in rows if row["status"] == "ok"}
        for function in functions.values():
            function(None)
        _say(f"{shape}: {len(functions)} functions, {arguments.rounds} rounds")
        samples = take_turns(functions, self._watch, arguments.rounds)
        rows = [{"provider": name, "status": "ok", "version": str(torch.__version__)} for name in (THREE, FOUR)] + rows
        return [results.timed(row, samples) if row["status"] == "ok" else row for row in rows]

    def _row(self, name: str, trial: Trial | None, truth: Truth | None) -> Row:
        """Checked, and its memory measured; the time that took is said, as most of it is compiling."""
        if name in self._arguments.skip:
            return {"provider": name, "status": "skipped", "note": "on request"}
        if trial is None:
            status, why = self._absent[name]
            return {"provider": name, "status": status, "note": reason(why)}
        start = time.perf_counter()
        row = {"provider": name, "version": trial.provider.version, **_attempt(trial, truth)}
        # Of a failure, the graph and all it holds.
        gc.collect()
        _say(f"{name}: {row['status']} {row.get('note', '')}, {time.perf_counter() - start:.1f} s")
        return row


def _attempt(trial: Trial, truth: Truth | None) -> Row:
    """Errors and memory, with whatever they raise as a row that says so."""
    try:
        row = trial.check(truth) if truth is not None else {}
        trial.both()
        return {"status": "ok", **row, **trial.memory()}
    except WrongAnswer as error:
        return {"status": "failed", "note": str(error), **error.errors}
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "note": reason(error)}
    except Exception as error:
        return {"status": "failed", "note": reason(error)}


def _start_afresh() -> None:
    """Nothing compiled or allocated for the shape before."""
    registry.forget_compiled()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _print(group: list[Row], is_timed: bool) -> None:
    if not group:
        return
    head = f"{results.title(group)}, {group[0]['device']}, torch {group[0]['torch']}, Triton {group[0]['triton']}"
    print("\n".join(["", head, as_text(results.cells(group), results.TABLE), *results.notes(group)]), flush=True)
    if is_timed:
        print("\n" + as_text([verdict.cells() for verdict in verdicts(group)], NAMES), flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
