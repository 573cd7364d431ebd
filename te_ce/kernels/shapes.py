"""Block shapes: fixed choices by dtype, columns and smoothing. Never by rows: a row's bits do not depend on the batch.

Chosen on an H200; `python -m benchmarks.tune` measures the candidates there or elsewhere. Nothing is tuned at run time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

THREADS_PER_WARP = 32
VECTOR_BYTES = 16  # of the widest access of a thread
LINE_BYTES = 128  # of the L2 cache


class WalkShape(NamedTuple):
    """How a program walks a row: blocks of unroll x (32 num_warps) vectors of 16 bytes."""

    unroll: int
    num_warps: int

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return THREADS_PER_WARP * self.num_warps


class TileShape(NamedTuple):
    """Elements that a program takes, and its warps."""

    elements: int
    num_warps: int


# The widest walks. Two vectors a thread and block, and the two of the next block, fit into 32 registers: a
# multiprocessor holds as many threads as it can. float32 has half as many columns in a vector.
WALK_16_BIT = WalkShape(unroll=2, num_warps=4)
# A second sum a thread takes the registers of one of its vectors.
SMOOTHED_WALK_16_BIT = WalkShape(unroll=1, num_warps=4)
WALK_32_BIT = WalkShape(unroll=1, num_warps=8)

# Blocks whose bits must not depend on how the vocabulary is cut: 16 columns a thread, and the next 16 on their way.
BLOCK_WARPS = 8
# At the most, for the plain loss and with one sum more: the compiler would take more for the loads of single columns,
# which few rows need. What makes more needs them.
BLOCK_REGISTERS = (64, 80)
# Blocks that a program takes one after the other; a row of few columns still makes several programs.
BLOCKS_OF_A_PROGRAM = 8

# 4 KiB a tile, 32 bytes a thread.
GRADIENT_TILE_BYTES = 4096
GRADIENT_THREAD_BYTES = 32

# Registers of a thread where the entropy has a gradient, by architecture: as many as let a multiprocessor hold all the
# threads that it can. The few tiles that hold the target or padding spill two of them.
ENTROPY_REGISTERS = {90: 32}

# Rows of a merge.
MERGE_TILE = TileShape(128, 4)

# Elements of a sum that is scaled and rounded.
SCALING_TILE = TileShape(4096, 8)


def vector_elements(dtype: torch.dtype) -> int:
    """Elements of the widest access of a thread."""
    return VECTOR_BYTES // dtype.itemsize


def walk_shape(dtype: torch.dtype, columns: int, second_sum: bool) -> WalkShape:
    """The walk of a span of `columns`: no wider than needed. A second sum: of smoothing, or for the entropy."""
    if dtype.itemsize == 4:
        widest = WALK_32_BIT
    else:
        widest = SMOOTHED_WALK_16_BIT if second_sum else WALK_16_BIT
    vectors = max(1, -(-columns // vector_elements(dtype)))
    num_warps = min(widest.num_warps, _power_of_2(-(-vectors // THREADS_PER_WARP)))
    return WalkShape(min(widest.unroll, _power_of_2(-(-vectors // (THREADS_PER_WARP * num_warps)))), num_warps)


def block_shape(dtype: torch.dtype, columns: int) -> WalkShape:
    """All `columns` of a block at once."""
    threads = THREADS_PER_WARP * BLOCK_WARPS
    return WalkShape(columns // (threads * vector_elements(dtype)), BLOCK_WARPS)


def block_registers(extras: int) -> int | None:
    """Registers of a thread at the most that makes so many sums more than for the plain loss; None: any number."""
    return BLOCK_REGISTERS[extras] if extras < len(BLOCK_REGISTERS) else None


def walk_line(shape: WalkShape) -> int:
    """Bytes at a multiple of which the walk begins; what lies before is a column a thread, so few threads take less."""
    return LINE_BYTES if shape.threads >= LINE_BYTES else VECTOR_BYTES


class WalkPlan(NamedTuple):
    """Everything about a walk that the rows' addresses do not decide."""

    shape: WalkShape
    span_blocks: int  # blocks of a part
    has_tail: bool  # a row's columns do not end with a whole vector


@functools.lru_cache(maxsize=64)
def walk_plan(dtype: torch.dtype, columns: int, parts: int, second_sum: bool) -> WalkPlan:
    """The walk over rows of `columns`, in so many parts."""
    shape = walk_shape(dtype, -(-columns // parts), second_sum)
    block = shape.unroll * shape.threads * vector_elements(dtype)
    return WalkPlan(shape, max(1, -(-columns // (parts * block))), columns * dtype.itemsize % VECTOR_BYTES != 0)


@functools.lru_cache(maxsize=64)
def gradient_tile(dtype: torch.dtype, columns: int) -> TileShape:
    """The tile of a row of `columns`: no wider than needed."""
    size = min(GRADIENT_TILE_BYTES, _power_of_2(columns * dtype.itemsize))
    return TileShape(max(16, size // dtype.itemsize), max(1, size // (GRADIENT_THREAD_BYTES * THREADS_PER_WARP)))


@functools.cache
def architecture(device: int) -> int:
    """Compute capability of a GPU in one number, 90 for 9.0; 0 of the CPU, which is -1."""
    if device < 0:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def gradient_registers(arch: int, has_entropy: bool, has_more: bool) -> int | None:
    """What the gradient's registers of a thread are limited to; None: no limit.

    Args:
        has_entropy: among the outputs that have gradients.
        has_more: smoothing, a softcap, a scale of each row or a second row dimension, which would be spilled.
    """
    return ENTROPY_REGISTERS.get(arch) if has_entropy and not has_more else None


def _power_of_2(number: int) -> int:
    """The least power of 2 that is no less than `number` >= 1."""
    return 1 << (number - 1).bit_length()
