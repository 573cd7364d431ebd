"""The kernels that only the linear loss has, compiled: no spills, no atomics, and the copy in accesses of 16 bytes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from triton.runtime import driver

from te_ce.kernels import launch_linear
from te_ce.problem import ShardProblem
from tests.compiled.build import Compiled, Target, Warmup
from tests.compiled.claims import check_no_atomics, found_accesses
from tests.compiled.resources import check_no_spills

_ARCHS = [80, 90, 100]


def _compiled(name: str, arch: int, problem: ShardProblem | None, dtype: torch.dtype = torch.bfloat16) -> Compiled:
    warmup = Warmup(getattr(launch_linear, name))
    with (
        mock.patch.object(launch_linear, name, warmup),
        mock.patch.object(driver, "_active", Target(arch)),
    ):
        if problem is not None:
            launch_linear.combine_statistics(torch.zeros(3, problem.fields, 300), problem)
        else:
            # A scalar that begins at a multiple of 16 bytes, as all memory that CUDA gives does.
            launch_linear.scaled_copy(torch.zeros(9000), torch.zeros(8)[0], dtype)
    (compiled,) = warmup.results
    return compiled


@pytest.mark.parametrize("arch", _ARCHS)
@pytest.mark.parametrize("outputs", [(), ("entropy", "predictions")], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_combining(arch: int, alpha: float, outputs: tuple[str, ...]) -> None:
    problem = ShardProblem(0, 8, 16, -100, alpha, outputs=outputs)
    compiled = _compiled("combine_statistics_kernel", arch, problem)
    check_no_spills(compiled)
    check_no_atomics(compiled)


@pytest.mark.parametrize("arch", _ARCHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scaling(arch: int, dtype: torch.dtype) -> None:
    compiled = _compiled("scaled_copy_kernel", arch, None, dtype)
    check_no_spills(compiled)
    check_no_atomics(compiled)
    found = found_accesses(compiled)
    # 16 elements a thread in 4-byte floats: of the whole blocks, whose bounds need no mask.
    assert found["ld", 16] >= 4
    assert found["st", 16] >= dtype.itemsize
