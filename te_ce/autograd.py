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
from te_ce.outputs import OutputGrads
from te_ce.problem import ShardProblem
from te_ce.record import Record
from te_ce.second_derivative import forbid_second_derivative

Inplace = Literal["auto"] | bool


class LossCall(NamedTuple):
    """What one call needs besides its tensors; resolved and checked before the node is made."""

    problem: ShardProblem
    group: ProcessGroup | None  # None: of one rank
    backend: Backend
    inplace: Inplace
    reads_in_place: bool  # the logits where they lie; False: a copy
    record: Record | None  # what a checked call exchanges first, but for the targets; None: not checked


def forward(
    logits: Tensor, target: Tensor, call: LossCall, row_scale: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Loss [..] of every row, what is saved of the whole rows, and the outputs asked for; counts one loss served."""
    backend, problem = call.backend, call.problem
    if call.group is None:
        results = backend.row_loss(logits, target, problem, row_scale)
    else:
        gathered = gather_statistics(backend.row_statistics(logits, target, problem, row_scale), call.group)
        results = backend.merge_statistics(gathered, target, problem, row_scale)
    count_loss(backend.name)
    return results


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Loss per row from this rank's columns, and their gradient.

    Per rank: logits [.., V_local], target [..] -> loss [..] float32, bit-identical on all ranks of the group.

    Forward, with z the real columns of the whole row, a' the smoothing weight and w that of the z-loss:
        M = max z, d = sum exp(z - M), L = (1 - a') (log d - (z_y - M)) + a' (log d - mean(z - M)) + w (M + log d)^2
    Gradient, with g the gradient of L:
        dz_i = g (1 + 2 w lse) p_i - g a'/V - g (1 - a') [i = y],  p_i = exp(z_i - M) / d
    z = scale cap tanh(x / cap) of the logits x, where there is a scale (of the row, or one for all) or a softcap. With
    z = |scale| u, the statistics are of u, m = max u, and only differences are multiplied: z is never rounded.

    Saved for backward: the logits themselves (no copy), the target, m, d (8 bytes a row), and the rows' scale.
    Collectives: one all-gather of 12 bytes a row (20 with smoothing) in forward; none in backward.
    Extra memory: a few floats a row where the gradient takes over the logits' storage, else one buffer of their size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, call: LossCall, row_scale: Tensor | None) -> Tensor:
        loss, saved, _ = forward(logits, target, call, row_scale)
        if ctx.needs_input_grad[0]:
            if call.inplace == "auto":
                ownership.prepare(logits)
            ctx.save_for_backward(logits, target, saved, row_scale)
            ctx.call, ctx.is_overwritten = call, False
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        call: LossCall = ctx.call
        logits, target, saved, row_scale = ctx.saved_tensors
        # Counted here, and not in a function that both nodes share: its frame would be another owner.
        overwrite = (
            ownership.is_sole_owner(ownership.owner_counts(logits)) and not may_share_memory(logits)
            if call.inplace == "auto"
            else bool(call.inplace)
        )
        note_overwriting(ctx, overwrite)
        grads = OutputGrads(readable(grad_loss))
        return logits_gradient(logits, target, grads, saved, call, row_scale, overwrite), None, None, None


def note_overwriting(ctx: Any, overwrite: bool) -> None:
    """Remember that this backward overwrites the logits, before the first write.

    Autograd refuses another one by their version; but nobody looks at that where hooks have what is saved.

    Raises:
        RuntimeError: one before, interrupted or not, has overwritten them: they are its gradient, or a part of it.
    """
    if ctx.is_overwritten:
        raise RuntimeError(
            "expected one backward, got another after one that overwrote its logits; compute the loss again, or with "
            "inplace=False"
        )
    ctx.is_overwritten = overwrite


def logits_gradient(
    logits: Tensor,
    target: Tensor,
    grads: OutputGrads,
    saved: Tensor,
    call: LossCall,
    row_scale: Tensor | None,
    overwrite: bool,
) -> Tensor:
    """Gradient of the logits, in their storage or in a new one; the end of both nodes' backward."""
    if not torch.is_grad_enabled():
        return _gradient(logits, target, grads, saved, call, row_scale, overwrite)
    # create_graph=True
    with torch.no_grad():
        grad_logits = _gradient(logits, target, grads, saved, call, row_scale, overwrite)
    return forbid_second_derivative(grad_logits, logits, *(grad for grad in grads if grad is not None))


def _gradient(
    logits: Tensor,
    target: Tensor,
    grads: OutputGrads,
    saved: Tensor,
    call: LossCall,
    row_scale: Tensor | None,
    overwrite: bool,
) -> Tensor:
    if not overwrite:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        call.backend.logits_gradient(logits, target, grads, saved, out, call.problem, row_scale)
        return out
    # Before the first write: a backward that is interrupted and tried again must raise.
    torch.autograd.graph.increment_version(logits)
    call.backend.logits_gradient(logits, target, grads, saved, logits, call.problem, row_scale)
    # An alias: autograd would copy the saved tensor itself on its way to whoever wants the gradient.
    return logits.detach()
