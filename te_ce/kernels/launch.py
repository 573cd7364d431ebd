"""Launchers of the kernels: block shapes, grids and strides; the same functions as `te_ce.reference`.

Rows lie on grid axis 0, which has no 65,535 limit; row offsets are 64-bit inside the kernels. Block shapes depend on
the width of the shard and on smoothing, never on the rows, so that the bits of a row do not depend on the batch.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from te_ce.kernels.gradient import logits_gradient_kernel
from te_ce.kernels.merge import merge_statistics_kernel
from te_ce.kernels.statistics import row_statistics_kernel
from te_ce.layout import row_parts
from te_ce.problem import ShardProblem


class BlockShape(NamedTuple):
    """Elements that a program takes at a time, and its warps."""

    elements: int
    num_warps: int


# The widest blocks; narrower shards take the next power of two.
STATISTICS_BLOCK = BlockShape(4096, 4)
# Smoothing adds a sum to each lane: with the wider block, registers spill on sm_80.
SMOOTHED_STATISTICS_BLOCK = BlockShape(2048, 4)
MERGE_BLOCK = BlockShape(128, 4)
GRADIENT_BLOCK = BlockShape(2048, 4)

# Contract a * b + c where the source says so, on every Triton version: its default changes in 3.10.
COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}

_MAX_GRID = 2**31 - 1


def column_block(widest: BlockShape, columns: int) -> BlockShape:
    """The block for a shard of `columns`: no wider than needed, with one warp per 256 elements."""
    elements = min(widest.elements, max(16, triton.next_power_of_2(max(1, columns))))
    return BlockShape(elements, max(1, min(widest.num_warps, elements // 256)))


def row_statistics(logits: Tensor, target: Tensor, problem: ShardProblem) -> Tensor:
    """See `te_ce.reference.row_statistics`; rows with neighbouring columns contiguous are read in place."""
    n_rows = target.numel()
    stats = torch.empty((problem.fields, n_rows), dtype=torch.float32, device=logits.device)
    smoothed = problem.smoothing_weight != 0.0
    block = column_block(SMOOTHED_STATISTICS_BLOCK if smoothed else STATISTICS_BLOCK, problem.real_columns)
    if n_rows == 0:
        return stats
    with _on_device_of(logits):
        for part in row_parts(target.shape, (logits, target)):
            (logits_outer, logits_inner), (target_outer, target_inner) = part.grid.strides
            row_statistics_kernel[(_checked_grid(part.n_rows),)](
                *part.tensors,
                stats[:, part.first :],
                part.grid.inner,
                logits_outer,
                logits_inner,
                target_outer,
                target_inner,
                n_rows,
                logits.shape[-1],
                problem.start,
                problem.real_columns,
                HAS_SMOOTHING=smoothed,
                HAS_PADDING=problem.real_columns != logits.shape[-1],
                BLOCK_V=block.elements,
                num_warps=block.num_warps,
                **COMPILE_OPTIONS,
            )
    return stats


def merge_statistics(gathered: Tensor, target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor]:
    """See `te_ce.reference.merge_statistics`."""
    n_ranks, n_fields, n_rows = gathered.shape
    loss = torch.empty(target.shape, dtype=torch.float32, device=gathered.device)
    saved = torch.empty((2, n_rows), dtype=torch.float32, device=gathered.device)
    if n_rows == 0:
        return loss, saved
    with _on_device_of(gathered):
        for part in row_parts(target.shape, (target,)):
            ((target_outer, target_inner),) = part.grid.strides
            merge_statistics_kernel[(triton.cdiv(part.n_rows, MERGE_BLOCK.elements),)](
                gathered[:, :, part.first :],
                *part.tensors,
                loss.view(-1)[part.first :],
                saved[:, part.first :],
                part.n_rows,
                n_ranks,
                n_fields * n_rows,
                n_rows,
                part.grid.inner,
                target_outer,
                target_inner,
                problem.classes,
                problem.ignore_index,
                problem.smoothing_weight,
                problem.target_weight,
                HAS_SMOOTHING=problem.smoothing_weight != 0.0,
                BLOCK_N=MERGE_BLOCK.elements,
                num_warps=MERGE_BLOCK.num_warps,
                **COMPILE_OPTIONS,
            )
    return loss, saved


def logits_gradient(
    logits: Tensor, target: Tensor, grad_loss: Tensor, saved: Tensor, out: Tensor, problem: ShardProblem
) -> None:
    """See `te_ce.reference.logits_gradient`."""
    n_columns = logits.shape[-1]
    if logits.numel() == 0:
        return
    block = column_block(GRADIENT_BLOCK, n_columns)
    n_tiles = triton.cdiv(n_columns, block.elements)
    with _on_device_of(logits):
        for part in row_parts(target.shape, (logits, target, grad_loss, out)):
            logits_part, target_part, grad_part, out_part = part.tensors
            logits_gradient_kernel[(_checked_grid(part.n_rows * n_tiles),)](
                logits_part,
                target_part,
                grad_part,
                saved[:, part.first :],
                out_part,
                part.grid.inner,
                *(stride for strides in part.grid.strides for stride in strides),
                saved.shape[1],
                n_columns,
                n_tiles,
                problem.start,
                problem.real_columns,
                problem.classes,
                problem.ignore_index,
                problem.target_weight,
                problem.class_weight,
                HAS_SMOOTHING=problem.smoothing_weight != 0.0,
                BLOCK_V=block.elements,
                num_warps=block.num_warps,
                **COMPILE_OPTIONS,
            )


def _checked_grid(programs: int) -> int:
    if programs > _MAX_GRID:
        raise ValueError(f"logits: expected at most {_MAX_GRID} tiles in one call, got {programs}; split the rows")
    return programs


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device; switch only where that is another one."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
