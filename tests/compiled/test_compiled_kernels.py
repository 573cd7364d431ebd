"""The shipped kernels, compiled for three generations of GPUs: no spills, 16-byte accesses, 64-bit rows, no atomics.

One factor varies at a time around the usual case, plus pairs of those that cost registers.
"""

from __future__ import annotations

import pytest
import torch

from te_ce.kernels.launch import COMPILE_OPTIONS
from tests.compiled.build import GRADIENT, MERGE, STATISTICS, Case, shipped
from tests.compiled.claims import check_fp_fusion, check_no_atomics, check_row_offsets, check_wide_accesses
from tests.compiled.resources import check_no_spills, check_registers

USUAL = Case()  # sm_90, bfloat16, a shard of 64128 columns: rows begin at multiples of 16 bytes

ALIGNED = [
    USUAL,
    USUAL._replace(arch=80),
    USUAL._replace(arch=100),
    USUAL._replace(dtype=torch.float16),
    USUAL._replace(dtype=torch.float32),  # twice the accesses
    USUAL._replace(smoothing=True),  # a second sum per lane: the most registers
    USUAL._replace(smoothing=True, arch=80),
    USUAL._replace(smoothing=True, arch=100),
    USUAL._replace(smoothing=True, dtype=torch.float32),
    USUAL._replace(folded=True),  # a division, and a second stride per tensor
    USUAL._replace(columns=512),  # a block narrower than the widest, with fewer warps
]

# Rows begin anywhere, so that accesses are of one element, with an address and a predicate each: more registers.
ODD = [
    USUAL._replace(columns=50257),
    USUAL._replace(columns=50257, arch=80),
    USUAL._replace(columns=50257, arch=100),
    USUAL._replace(columns=50257, dtype=torch.float32),
    USUAL._replace(columns=50257, smoothing=True),
    USUAL._replace(columns=50257, smoothing=True, arch=100, dtype=torch.float32),  # the most of all
]

# The merge sees neither the logits nor their width.
MERGE_CASES = [
    USUAL._replace(arch=arch, smoothing=smoothing) for arch in (80, 90, 100) for smoothing in (False, True)
] + [USUAL._replace(folded=True)]

ON_LOGITS = [(name, case) for name in (STATISTICS, GRADIENT) for case in ALIGNED + ODD]
ALL = ON_LOGITS + [(MERGE, case) for case in MERGE_CASES]


def resident_programs(name: str, case: Case) -> int:
    """Programs that the registers of a multiprocessor must hold at the least, to have enough loads on the way.

    The statistics keep the compensated sums of a whole block in registers (64 a thread), beside the block.
    """
    odd = case.columns % 8 != 0
    if name == MERGE:
        return 16
    if name == GRADIENT:
        return 5 if odd else 8
    return 3


@pytest.mark.parametrize(("name", "case"), ALL, ids=str)
def test_nothing_is_spilled(name: str, case: Case) -> None:
    # Where addresses are many, ptxas may park one of 64 bits across the loop: two instructions a row, none a loop.
    odd = case.columns % 8 != 0
    many_addresses = odd if name == GRADIENT else odd or case.folded
    check_no_spills(shipped(name, case), outside_loops=8 if many_addresses else 0)


@pytest.mark.parametrize(("name", "case"), ALL, ids=str)
def test_registers_leave_room_for_other_programs(name: str, case: Case) -> None:
    check_registers(shipped(name, case), resident_programs(name, case))


@pytest.mark.parametrize(("name", "case"), [(n, c) for n, c in ON_LOGITS if c in ALIGNED], ids=str)
def test_blocks_of_aligned_rows_move_16_bytes_at_a_time(name: str, case: Case) -> None:
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


@pytest.mark.parametrize("name", [STATISTICS, MERGE, GRADIENT])
def test_the_code_is_for_the_target(name: str) -> None:
    for arch in (80, 90, 100):
        assert f".target sm_{arch}" in shipped(name, USUAL._replace(arch=arch)).ptx
