"""The times behind te_ce/kernels/shapes.py: `python -m benchmarks.tune` on a GPU.

For every constant there: all candidates at several vocabularies, ranked by the geometric mean of their times relative
to the best one of each vocabulary; and the line that holds the winner. Nothing of this happens when te_ce runs.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch

from benchmarks.measure import Stopwatch
from te_ce import LossOptions, VocabShard
from te_ce.kernels import launch, launch_gradient, shapes
from te_ce.outputs import OutputGrads
from te_ce.problem import ShardProblem

ROWS = 8192
WALKS = [shapes.WalkShape(unroll, warps) for unroll in (1, 2, 4) for warps in (2, 4, 8)]
TILE_BYTES = [1024, 2048, 4096, 8192]
THREAD_BYTES = [16, 32, 64]


class Constant(NamedTuple):
    """One choice of `shapes`: where it is used, and what it might be.

    Attributes:
        names: of the constants that a candidate sets, in the order of its values.
        smoothed: by the loss with label smoothing.
        backward: by the gradient, not by the statistics.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    smoothed: bool
    backward: bool
    candidates: list[tuple[object, ...]]


CONSTANTS = [
    Constant(("WALK_16_BIT",), torch.bfloat16, False, False, [(walk,) for walk in WALKS]),
    Constant(("SMOOTHED_WALK_16_BIT",), torch.bfloat16, True, False, [(walk,) for walk in WALKS]),
    Constant(("WALK_32_BIT",), torch.float32, False, False, [(walk,) for walk in WALKS]),
    Constant(
        ("GRADIENT_TILE_BYTES", "GRADIENT_THREAD_BYTES"),
        torch.bfloat16,
        False,
        True,
        [(tile, thread) for tile in TILE_BYTES for thread in THREAD_BYTES if tile // thread in (32, 64, 128, 256)],
    ),
]


def rank(times: dict[tuple[object, ...], dict[int, float]]) -> list[tuple[float, tuple[object, ...]]]:
    """Candidates, best first, with the geometric mean of their times relative to the best at each vocabulary.

    Args:
        times: milliseconds of each candidate by vocabulary; the same vocabularies for all.
    """
    vocabularies = next(iter(times.values())).keys()
    best = {columns: min(of[columns] for of in times.values()) for columns in vocabularies}
    means = [
        (math.exp(sum(math.log(of[columns] / best[columns]) for columns in vocabularies) / len(best)), candidate)
        for candidate, of in times.items()
    ]
    return sorted(means, key=lambda mean: mean[0])


@contextlib.contextmanager
def chosen(constant: Constant, candidate: tuple[object, ...]) -> Iterator[None]:
    """Within: the launchers use `candidate`."""
    with contextlib.ExitStack() as stack:
        for name, value in zip(constant.names, candidate, strict=True):
            stack.enter_context(mock.patch.object(shapes, name, value))
        _forget()
        yield
    _forget()


def _forget() -> None:
    shapes.walk_plan.cache_clear()
    shapes.gradient_tile.cache_clear()
    for launches in (launch._statistics_launches, launch._loss_launches, launch_gradient._gradient_launches):
        launches.cache_clear()


def _step(constant: Constant, columns: int, device: torch.device) -> Callable[[object], object]:
    """Forward or backward of random logits."""
    options = LossOptions(label_smoothing=0.1 if constant.smoothed else 0.0)
    problem = ShardProblem.resolve(options, VocabShard(0, columns, columns))
    logits = torch.empty(ROWS, columns, dtype=constant.dtype, device=device).normal_()
    target = torch.randint(columns, (ROWS,), device=device)
    if not constant.backward:
        return lambda _: launch.row_loss(logits, target, problem)
    _, saved, _ = launch.row_loss(logits, target, problem)
    grads, out = OutputGrads(torch.rand(ROWS, device=device)), torch.empty_like(logits)
    return lambda _: launch_gradient.logits_gradient(logits, target, grads, saved, out, problem)


def main(command: list[str] | None = None) -> None:
    """Measure all candidates and print them, best first."""
    parser = argparse.ArgumentParser(prog="benchmarks.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[16000, 32000, 50257, 128256], metavar="V")
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args(command)
    if not torch.cuda.is_available():
        parser.error("expected a GPU, found none")
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, {ROWS} rows")
    for constant in CONSTANTS:
        times: dict[tuple[object, ...], dict[int, float]] = {candidate: {} for candidate in constant.candidates}
        for columns in arguments.vocabularies:
            step = _step(constant, columns, device)
            for candidate, of in times.items():
                with chosen(constant, candidate):
                    of[columns] = Stopwatch(device, arguments.runs).device_ms(step, lambda: None).median
        ranked = rank(times)
        for mean, candidate in ranked[:5]:
            found = ", ".join(f"{columns}: {ms:.4f} ms" for columns, ms in times[candidate].items())
            print(f"#   {mean:.3f}  {candidate}  {found}")
        for name, value in zip(constant.names, ranked[0][1], strict=True):
            print(f"{name} = {value}", flush=True)


if __name__ == "__main__":
    main()
