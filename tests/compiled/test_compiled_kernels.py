"""The shipped kernels, compiled for three generations of GPUs: no spills, 16-byte accesses, 64-bit rows, no atomics.

One factor varies at a time around the usual case, plus pairs of those that cost registers.
"""

from __future__ import annotations

import pytest
import torch

from te_ce.kernels.launcher import COMPILE_OPTIONS
from tests.compiled.build import GRADIENT, MERGE, ROW_LOSS, STATISTICS, Case, shipped
from tests.compiled.claims import check_fp_fusion, check_no_atomics, check_row_offsets, check_wide_accesses
from tests.compiled.resources import check_no_spills, check_registers, check_spills_are_rare

USUAL = Case()  # sm_90, bfloat16, a shard of 64128 columns: rows begin at multiples of 16 bytes

ALIGNED = [
    USUAL,
    USUAL._replace(arch=80),
    USUAL._replace(arch=100),
    USUAL._replace(dtype=torch.float16),
    USUAL._replace(dtype=torch.float32),
    USUAL._replace(smoothing=True),  # a second sum per thread: the most registers
    USUAL._replace(smoothing=True, arch=80),
    USUAL._replace(smoothing=True, arch=100),
    USUAL._replace(smoothing=True, dtype=torch.float32),
    USUAL._replace(folded=True),  # a division, and a second stride per tensor
    USUAL._replace(columns=512),  # a block narrower than the widest, with fewer warps
]

# Rows begin and end anywhere: edge columns one by one, and the rest in whole vectors all the same.
ODD = [
    USUAL._replace(columns=50257),
    USUAL._replace(columns=50257, arch=80),
    USUAL._replace(columns=50257, arch=100),
    USUAL._replace(columns=50257, dtype=torch.float32),
    USUAL._replace(columns=50257, smoothing=True),
    USUAL._replace(columns=50257, smoothing=True, arch=100, dtype=torch.float32),
    USUAL._replace(columns=50264),  # whole vectors, but no whole lines of 128 bytes
    USUAL._replace(padding=47),
]

# The merge sees neither the logits nor their width.
MERGE_CASES = [
    USUAL._replace(arch=arch, smoothing=smoothing) for arch in (80, 90, 100) for smoothing in (False, True)
] + [USUAL._replace(folded=True)]

EVERY = ("log_probs", "entropy", "lse")

# What the gradient takes besides: more sums of a row, a second factor of an exponential, a tanh.
OPTIONS = [
    USUAL._replace(z_loss=True),
    USUAL._replace(outputs=("log_probs", "lse")),
    USUAL._replace(outputs=EVERY, arch=80),
    USUAL._replace(outputs=EVERY, arch=100),
    USUAL._replace(outputs=EVERY, dtype=torch.float32),
    USUAL._replace(outputs=EVERY, columns=50257),
    USUAL._replace(outputs=EVERY, folded=True),
    USUAL._replace(outputs=EVERY, smoothing=True),
    USUAL._replace(scale=0.7),
    USUAL._replace(row_scale=True),
    USUAL._replace(row_scale=True, folded=True),
    USUAL._replace(row_scale=True, outputs=EVERY),
    USUAL._replace(softcap=30.0),
    USUAL._replace(softcap=30.0, arch=80),
    USUAL._replace(softcap=30.0, arch=100),
    USUAL._replace(softcap=30.0, dtype=torch.float32, columns=50257),
    USUAL._replace(softcap=30.0, row_scale=True, z_loss=True, smoothing=True, outputs=EVERY),
]

# Held to so few registers that tiles with the target or padding spill some.
LIMITED = [
    USUAL._replace(outputs=("entropy",)),
    USUAL._replace(outputs=EVERY),
    USUAL._replace(outputs=EVERY, z_loss=True),
    USUAL._replace(outputs=EVERY, dtype=torch.float16, scale=0.7),
    USUAL._replace(outputs=EVERY, padding=47),
    USUAL._replace(outputs=EVERY, columns=512),
]

ON_LOGITS = [(name, case) for name in (STATISTICS, ROW_LOSS, GRADIENT) for case in ALIGNED + ODD]
ON_LOGITS += [(GRADIENT, case) for case in OPTIONS]
WITHOUT_SPILLS = ON_LOGITS + [(MERGE, case) for case in MERGE_CASES]
ON_LOGITS += [(GRADIENT, case) for case in LIMITED]
ALL = WITHOUT_SPILLS + [(GRADIENT, case) for case in LIMITED]


def resident_warps(name: str, case: Case) -> int:
    """Warps that the registers of a multiprocessor must hold at the least, of the 64 that it can, to have enough loads
    on the way."""
    if case in LIMITED:
        return 64
    # A division and a second stride a tensor; a second sum a thread; narrow blocks, of which a multiprocessor holds 32;
    # a tanh.
    if case.folded or (case.smoothing and name != GRADIENT) or case.columns < 1024 or case.softcap:
        return 32
    # The shapes were chosen on sm_90.
    return 48 if case.arch == 90 else 32


@pytest.mark.parametrize(("name", "case"), WITHOUT_SPILLS, ids=str)
def test_nothing_is_spilled(name: str, case: Case) -> None:
    check_no_spills(shipped(name, case))


@pytest.mark.parametrize("case", LIMITED, ids=str)
def test_the_usual_tile_spills_nothing(case: Case) -> None:
    check_spills_are_rare(shipped(GRADIENT, case), elements=16, stack=8)


@pytest.mark.parametrize(("name", "case"), ALL, ids=str)
def test_registers_leave_room_for_other_programs(name: str, case: Case) -> None:
    compiled = shipped(name, case)
    check_registers(compiled, resident_warps(name, case) * 32 // compiled.threads)


@pytest.mark.parametrize(("name", "case"), ON_LOGITS, ids=str)
def test_blocks_move_16_bytes_at_a_time(name: str, case: Case) -> None:
    check_wide_accesses(shipped(name, case))


@pytest.mark.parametrize(("name", "case"), ALL, ids=str)
def test_no_atomics(name: str, case: Case) -> None:
    check_no_atomics(shipped(name, case))


@pytest.mark.parametrize(("name", "case"), ALL, ids=str)
def test_row_offsets_are_64_bit(name: str, case: Case) -> None:
    check_row_offsets(shipped(name, case))


@pytest.mark.parametrize(("name", "case"), ALL, ids=str)
def test_contraction_is_what_the_launcher_asked_for(name: str, case: Case) -> None:
    check_fp_fusion(shipped(name, case), COMPILE_OPTIONS["enable_fp_fusion"])


@pytest.mark.parametrize("name", [STATISTICS, ROW_LOSS, MERGE, GRADIENT])
def test_the_code_is_for_the_target(name: str) -> None:
    for arch in (80, 90, 100):
        assert f".target sm_{arch}" in shipped(name, USUAL._replace(arch=arch)).ptx
