"""What a fault is, and where the code and the tests lie that faults name."""

from __future__ import annotations

from typing import NamedTuple

UNIT, RANKS, MEGATRON = "tests/unit/test_", "tests/distributed/test_", "tests/megatron/test_megatron_"
KERNELS, TWIN, LINEAR = "te_ce/kernels/", "te_ce/reference/", "te_ce/linear/"

INTERPRETED = (("TRITON_INTERPRET", "1"),)
"""Environment of tests that run kernels; without it the tests of the subjects are those of the twin."""


class Fault(NamedTuple):
    """One fault.

    Attributes:
        name: for people.
        file: of the code.
        old: a text that is there once.
        new: what it becomes.
        tests: node ids, without parameters or with them, one to three; they pass without the fault.
        environment: variables that the tests need.
        ranks: that the tests run on; 1: no torchrun.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    ranks: int = 1
