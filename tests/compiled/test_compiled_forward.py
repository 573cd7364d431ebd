"""The forward kernels with options and outputs, compiled: no spills, 16-byte accesses, 64-bit rows, no atomics."""

from __future__ import annotations

import functools
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from triton.runtime import driver

from te_ce.kernels import launch
from te_ce.outputs import OUTPUTS
from te_ce.problem import REPRODUCIBLE_BLOCK, ShardProblem
from tests.compiled.build import MERGE, ROW_LOSS, STATISTICS, Compiled, Target, Warmup, _at_a_line
from tests.compiled.claims import check_no_atomics, check_row_offsets, check_wide_accesses
from tests.compiled.resources import check_no_spills, check_registers

BLOCKS = "block_statistics_kernel"


class Options(NamedTuple):
    """What a call asks for; a shard of 64128 columns, unless it says otherwise."""

    outputs: tuple[str, ...] = ()
    softcap: float | None = None
    scale: float = 1.0
    row_scale: bool = False
    z_loss: float = 0.0
    smoothing: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    columns: int = 64128
    arch: int = 90

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults[name]]
        return "-".join(changed).replace("torch.", "") or "plain"


@functools.cache
def compiled(name: str, options: Options) -> Compiled:
    columns = options.columns
    problem = ShardProblem(
        start=columns,
        real_columns=columns,
        classes=2 * columns,
        ignore_index=-100,
        smoothing_weight=options.smoothing,
        parts=-(-columns // REPRODUCIBLE_BLOCK) if name == BLOCKS else 1,
        block=REPRODUCIBLE_BLOCK if name == BLOCKS else 0,
        z_loss_weight=options.z_loss,
        softcap=options.softcap,
        scale=options.scale,
        outputs=options.outputs,
    )
    logits = _at_a_line((8, 2, columns), options.dtype)
    target = torch.zeros((8, 2), dtype=torch.int64)
    row_scale = torch.ones(8, 2) if options.row_scale else None
    warmup = Warmup(getattr(launch, name))
    with mock.patch.object(launch, name, warmup), mock.patch.object(driver, "_active", Target(options.arch)):
        if name == MERGE:
            launch.merge_statistics(torch.zeros(2, problem.fields, 16), target, problem)
        elif name == ROW_LOSS:
            launch.row_loss(logits, target, problem, row_scale)
        else:
            launch.row_statistics(logits, target, problem, row_scale)
    (built,) = warmup.results
    return built


EVERYTHING = Options(OUTPUTS, softcap=30.0, row_scale=True, z_loss=0.01, smoothing=0.1)

# One thing at a time, and all of them.
CASES = [
    Options(z_loss=0.01),
    Options(("log_probs", "lse", "z_loss")),
    Options(("entropy",)),
    Options(("entropy",), arch=80),
    Options(("entropy",), arch=100),
    Options(("entropy",), columns=50257),
    Options(("entropy",), dtype=torch.float32),
    Options(("predictions",)),
    Options(("predictions",), columns=50257),
    Options(OUTPUTS),
    Options(OUTPUTS, columns=50257, dtype=torch.float16),
    Options(softcap=30.0),
    Options(softcap=30.0, arch=80),
    Options(softcap=30.0, dtype=torch.float32),
    Options(scale=0.7),
    Options(row_scale=True),
    EVERYTHING,
    EVERYTHING._replace(arch=80),
    EVERYTHING._replace(arch=100, dtype=torch.float32),
]
WALKS = [(name, options) for name in (STATISTICS, ROW_LOSS) for options in CASES]
OTHERS = [(BLOCKS, options) for options in (Options(), *CASES)]
OTHERS += [(MERGE, options) for options in (Options(OUTPUTS), EVERYTHING, EVERYTHING._replace(arch=80))]


@pytest.mark.parametrize(("name", "options"), WALKS + OTHERS, ids=str)
def test_nothing_is_spilled_and_nothing_is_atomic(name: str, options: Options) -> None:
    check_no_spills(compiled(name, options))
    check_no_atomics(compiled(name, options))
    check_row_offsets(compiled(name, options))


@pytest.mark.parametrize(("name", "options"), WALKS, ids=str)
def test_walks_read_16_bytes_at_a_time(name: str, options: Options) -> None:
    check_wide_accesses(compiled(name, options))


@pytest.mark.parametrize(("name", "options"), WALKS, ids=str)
def test_half_of_the_warps_are_resident(name: str, options: Options) -> None:
    check_registers(compiled(name, options), 32 * 32 // compiled(name, options).threads)
