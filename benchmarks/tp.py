"""The loss with its vocabulary over ranks: `torchrun --nproc-per-node 2 -m benchmarks.tp [--shapes 8192x128256 ...]`.

Shapes are global: each of W ranks holds V/W columns. The time of a run is that of the slowest rank; ranks are aligned
before each run by a small all-reduce. Beside the providers: the bare all-gather of three floats a row and rank.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import providers as registry
from benchmarks.arguments import add_arguments
from benchmarks.compare import Setting, Trial, ceilings, release, run
from benchmarks.measure import Bandwidth, Stopwatch, on_gpu
from benchmarks.problem import Case, Problem
from benchmarks.providers import Provider
from benchmarks.results import PROFILE, Row, Writer, reason, sources

# Those that know a vocabulary over ranks.
PROVIDERS = [
    *("te_ce", "te_ce, new buffer", "Megatron fused", "Megatron unfused"),
    *("Transformer Engine", "Transformer Engine, overwrite", "Liger vocab-parallel"),
]
GPU_SHAPES = ["8192x128256", "8192x64000", "8192x256000", "2048x32000"]
CPU_SHAPES = ["128x8192"]
STATISTICS = 3
BARE = "bare all-gather"

# torch 2.13 renames it and warns about the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def main(command: list[str] | None = None) -> list[Row]:
    """Run the command line on every rank; the rows are also returned."""
    command = sys.argv[1:] if command is None else command
    with_gpus = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="benchmarks.tp", description=__doc__.splitlines()[0])
    add_arguments(parser, GPU_SHAPES if with_gpus else CPU_SHAPES, 20, PROVIDERS)
    parser.add_argument("--graph", action="store_true", help="also capture CUDA graphs, collectives included")
    arguments = parser.parse_args(command)
    device = _start(with_gpus)
    try:
        watch = Stopwatch(device, arguments.runs, _aligner(device), lambda samples: _slowest(samples, device))
        first = dist.get_rank() == 0
        setting = Setting(
            *("tp", watch, _lowest(ceilings(device), device)),
            group=dist.group.WORLD,
            ranks=dist.get_world_size(),
            writes=first,
            graph=arguments.graph,
        )
        rows = run(arguments, command, setting)
        for more in (_bare_rows, _profile_rows):
            rows += (added := more(arguments, command, setting))
            if first:
                _record(added, arguments)
        return rows
    finally:
        dist.destroy_process_group()


def _profile_rows(arguments: argparse.Namespace, command: list[str], setting: Setting) -> list[Row]:
    """Collectives of one forward, and communication kernels of one forward and backward, as a profiler sees them.

    At the first shape, in rows of their own, and after everything was timed: a profiler slows down what comes later.
    """
    n_rows, columns = arguments.shapes[0]
    case = Case(n_rows, columns, getattr(torch, arguments.dtype))
    found, _ = registry.load([name for name in arguments.providers if name not in arguments.skip])
    rows = []
    for name in arguments.providers:
        if name not in found or found[name].lacks(case, setting.group):
            continue
        row = {"provider": name, "option": PROFILE, "version": found[name].version}
        try:
            row |= {"status": "ok", **_count_collectives(found[name], case, setting)}
        except Exception as error:
            row |= {"status": "failed", "note": reason(error)}
        rows.append(_common(arguments, command, setting, case.rows, case.columns) | row)
        release()
    return rows


def _count_collectives(provider: Provider, case: Case, setting: Setting) -> Row:
    trial = Trial(provider, Problem(case, setting.watch.device, setting.group), setting.group)
    trial.check()
    trial.problem.reset()
    forward = _profile(trial.forward)
    trial.problem.reset()
    step = _profile(trial.both)
    kernels = sum("nccl" in name.lower() and "kernel" in name.lower() for name in step)
    return {
        "collectives": sum(name.startswith("c10d::") for name in forward),
        "nccl_kernels": kernels if on_gpu(setting.watch.device) else None,
    }


def _profile(step: Any) -> list[str]:
    """Names of all operators and kernels of one call of `step`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return [event.name for event in profile.events()]


def _bare_rows(arguments: argparse.Namespace, command: list[str], setting: Setting) -> list[Row]:
    """Time of the collective alone, in the columns of forward and of eager mode."""
    rows = []
    for n_rows, columns in arguments.shapes:
        own = torch.zeros(STATISTICS, n_rows, device=setting.watch.device)
        gathered = own.new_empty(setting.ranks * STATISTICS, n_rows)

        def gather(_: None, own: Tensor = own, gathered: Tensor = gathered) -> None:
            _all_gather(gathered, own)

        row = _common(arguments, command, setting, n_rows, columns)
        row |= {"option": "plain", "provider": BARE, "status": "ok", "note": f"[{STATISTICS}, N] float32"}
        for name, time in (("fwd", setting.watch.device_ms), ("eager", setting.watch.eager_ms)):
            timing = time(gather, lambda: None)
            row |= {f"{name}_ms": timing.median, f"{name}_low": timing.low, f"{name}_high": timing.high}
        rows.append(row)
    return rows


def _common(arguments: argparse.Namespace, command: list[str], setting: Setting, rows: int, columns: int) -> Row:
    known = sources(setting.watch.device, setting.ceilings, arguments.runs, command, "benchmarks.tp", arguments.commit)
    known |= {"kind": "tp", "ranks": setting.ranks, "rows": rows, "columns": columns, "dtype": arguments.dtype}
    return known


def _record(rows: list[Row], arguments: argparse.Namespace) -> None:
    """Rows that are in no table of providers."""
    writer = Writer(arguments.out / "results.csv")
    for row in rows:
        writer.write(row)
        if row["provider"] == BARE:
            numbers = f"{row['fwd_ms']:.3f} ms, eager {row['eager_ms']:.3f} ms"
        elif row["status"] == "ok":
            kernels = "" if row["nccl_kernels"] is None else f", {row['nccl_kernels']} NCCL kernels in a whole step"
            numbers = f"{row['collectives']} collectives in a forward{kernels}"
        else:
            numbers = f"no profile: {row['note']}"
        print(f"{row['rows']} x {row['columns']}: {row['provider']}: {numbers}", flush=True)
    writer.close()


def _start(with_gpus: bool) -> torch.device:
    """Join torchrun's ranks, one GPU each."""
    if "RANK" not in os.environ:
        raise SystemExit("benchmarks.tp: expected to be started by torchrun --nproc-per-node W -m benchmarks.tp")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if with_gpus else torch.device("cpu")
    if with_gpus:
        torch.cuda.set_device(device)
    # A rank that fails alone leaves the others waiting: not for long.
    dist.init_process_group("nccl" if with_gpus else "gloo", timeout=datetime.timedelta(minutes=2))
    return device


def _aligner(device: torch.device) -> Any:
    token = torch.zeros(1, device=device)
    return lambda: dist.all_reduce(token)


def _slowest(samples: list[float], device: torch.device) -> list[float]:
    longest = torch.tensor(samples, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return list(longest.tolist())


def _lowest(found: Bandwidth, device: torch.device) -> Bandwidth:
    lowest = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return Bandwidth(*lowest.tolist())


if __name__ == "__main__":
    main()
