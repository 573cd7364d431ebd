"""The autograd node of the loss on logits."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce import ownership
from te_ce.backend import Backend
from te_ce.collectives import gather_statistics
from te_ce.counters import count_loss
from te_ce.layout import may_share_memory, readable
from te_ce.problem import ShardProblem

Inplace = Literal["auto"] | bool


class LossCall(NamedTuple):
    """What one call needs besides its tensors; resolved and checked before the node is made."""

    problem: ShardProblem
    group: ProcessGroup | None  # None: of one rank
    backend: Backend
    inplace: Inplace
    reads_in_place: bool  # the logits where they lie; False: a copy
    checks_targets: bool


def forward(logits: Tensor, target: Tensor, call: LossCall) -> tuple[Tensor, Tensor]:
    """Loss [..] of every row, and saved [2, N] = (m, d) of the whole rows; counts one loss served."""
    backend, problem = call.backend, call.problem
    if call.group is None:
        loss, saved = backend.row_loss(logits, target, problem)
    else:
        gathered = gather_statistics(backend.row_statistics(logits, target, problem), call.group)
        loss, saved = backend.merge_statistics(gathered, target, problem)
    count_loss(backend.name)
    return loss, saved


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Loss per row from this rank's columns, and their gradient.

    Per rank: logits [.., V_local], target [..] -> loss [..] float32, bit-identical on all ranks of the group.

    Forward, with z the real columns of the whole row and a' the smoothing weight:
        m = max z, d = sum exp(z - m), L = (1 - a') (log d - (z_y - m)) + a' (log d - mean(z - m))
    Gradient, with g the gradient of L:
        dz_i = g p_i - g a'/V - g (1 - a') [i = y],  p_i = exp(z_i - m) / d

    Saved for backward: the logits themselves (no copy), the target, and m, d (8 bytes a row).
    Collectives: one all-gather of 12 bytes a row (20 with smoothing) in forward; none in backward.
    Extra memory: a few floats a row where the gradient takes over the logits' storage, else one buffer of their size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, call: LossCall) -> Tensor:
        loss, saved = forward(logits, target, call)
        if ctx.needs_input_grad[0]:
            if call.inplace == "auto":
                ownership.prepare(logits)
            ctx.save_for_backward(logits, target, saved)
            ctx.call = call
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        call: LossCall = ctx.call
        logits, target, saved = ctx.saved_tensors
        if call.inplace == "auto":
            overwrite = ownership.is_sole_owner(ownership.owner_counts(logits)) and not may_share_memory(logits)
        else:
            overwrite = bool(call.inplace)
        if not torch.is_grad_enabled():
            return _gradient(logits, target, grad_loss, saved, call, overwrite), None, None
        # create_graph=True
        with torch.no_grad():
            grad_logits = _gradient(logits, target, grad_loss, saved, call, overwrite)
        return _Undifferentiable.apply(grad_logits, logits, grad_loss), None, None


def _gradient(
    logits: Tensor, target: Tensor, grad_loss: Tensor, saved: Tensor, call: LossCall, overwrite: bool
) -> Tensor:
    """Gradient of the logits, in their storage or in a new one."""
    if not overwrite:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        call.backend.logits_gradient(logits, target, readable(grad_loss), saved, out, call.problem)
        return out
    # Before the first write: a backward that is interrupted and tried again must raise.
    torch.autograd.graph.increment_version(logits)
    call.backend.logits_gradient(logits, target, readable(grad_loss), saved, logits, call.problem)
    # An alias: autograd would copy the saved tensor itself on its way to whoever wants the gradient.
    return logits.detach()


class _Undifferentiable(torch.autograd.Function):
    """Makes a second differentiation of the gradient an error, where it would silently be 0."""

    @staticmethod
    def forward(ctx: Any, grad_logits: Tensor, logits: Tensor, grad_loss: Tensor) -> Tensor:
        return grad_logits.view_as(grad_logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        raise RuntimeError(
            "the gradient of te_ce's loss was differentiated again, which is not supported; use "
            "torch.nn.functional.cross_entropy where second derivatives are needed"
        )
