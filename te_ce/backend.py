"""Chooses between the two implementations of the loss: the Triton kernels and their plain-torch twin.

CUDA tensors go to the kernels, CPU tensors to the twin, or to the kernels when TRITON_INTERPRET=1; float64 always goes
to the twin. TE_CE_BACKEND overrides. The choice is made before anything runs: a kernel that fails to compile or
launch raises, nothing falls back.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from te_ce import environment
from te_ce.outputs import OutputGrads
from te_ce.problem import ShardProblem


class RowStatistics(Protocol):
    """See `te_ce.reference.row_statistics`."""

    def __call__(
        self, logits: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
    ) -> Tensor: ...


class RowLoss(Protocol):
    """See `te_ce.reference.row_loss`."""

    def __call__(
        self, logits: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]: ...


class MergeStatistics(Protocol):
    """See `te_ce.reference.merge_statistics`."""

    def __call__(
        self, gathered: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]: ...


class CombineStatistics(Protocol):
    """See `te_ce.reference.combine_statistics`."""

    def __call__(self, gathered: Tensor, problem: ShardProblem, row_scale: Tensor | None = None) -> Tensor: ...


class LogitsGradient(Protocol):
    """See `te_ce.reference.logits_gradient`."""

    def __call__(
        self,
        logits: Tensor,
        target: Tensor,
        grads: OutputGrads,
        saved: Tensor,
        out: Tensor,
        problem: ShardProblem,
        row_scale: Tensor | None = None,
    ) -> None: ...


class ScaledCopy(Protocol):
    """See `te_ce.reference.scaled_copy`."""

    def __call__(self, total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor: ...


class Backend(NamedTuple):
    """One implementation of the steps of the loss: statistics and merge, or `row_loss` on one rank; then gradient.

    The last two are for the linear loss: statistics of parts of a shard to those of one part, before they are merged
    with other ranks'; and a gradient that was made in forward times what comes from above.
    """

    name: str
    row_loss: RowLoss
    row_statistics: RowStatistics
    merge_statistics: MergeStatistics
    logits_gradient: LogitsGradient
    combine_statistics: CombineStatistics
    scaled_copy: ScaledCopy


def choose_backend(logits: Tensor) -> Backend:
    """The implementation that serves `logits`.

    Raises:
        ValueError: TE_CE_BACKEND=triton can't serve this dtype or device, or names no backend.
        RuntimeError: the kernels are needed and Triton is missing or too old.
    """
    requested = environment.requested_backend()
    if requested == "torch":
        return _torch_backend()
    on_kernels = logits.is_cuda or (logits.device.type == "cpu" and environment.interpreter_requested())
    if logits.dtype == torch.float64:
        if requested == "triton":
            raise ValueError("TE_CE_BACKEND=triton: expected float32, bfloat16 or float16 logits, got float64")
        return _torch_backend()
    if on_kernels:
        return _triton_backend()
    if requested == "triton":
        raise ValueError(
            f"TE_CE_BACKEND=triton: expected CUDA logits, or TRITON_INTERPRET=1 for CPU logits, got {logits.device}"
        )
    return _torch_backend()


@functools.cache
def _torch_backend() -> Backend:
    from te_ce import reference

    return Backend(
        "torch",
        reference.row_loss,
        reference.row_statistics,
        reference.merge_statistics,
        reference.logits_gradient,
        reference.combine_statistics,
        reference.scaled_copy,
    )


@functools.cache
def _triton_backend() -> Backend:
    from te_ce.kernels import launch, launch_gradient, launch_linear

    return Backend(
        "triton",
        launch.row_loss,
        launch.row_statistics,
        launch.merge_statistics,
        launch_gradient.logits_gradient,
        launch_linear.combine_statistics,
        launch_linear.scaled_copy,
    )
