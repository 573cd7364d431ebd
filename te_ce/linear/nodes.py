"""The autograd node of the linear loss: a loss per row, any outputs, whatever gradients come back for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_ce.autograd_outputs import FOR_LOGGING, output_grads
from te_ce.collectives import gather_sequence
from te_ce.counters import count_loss
from te_ce.linear.call import LinearCall
from te_ce.linear.vocabulary_walk import Batch, Needed, gradients, row_loss
from te_ce.outputs import OutputGrads
from te_ce.second_derivative import forbid_second_derivative


def whole_batch(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, row_scale: Tensor | None, call: LinearCall
) -> Batch:
    """The tensors flattened, hidden states of the whole sequence; one all-gather with sequence parallelism."""
    if call.sequence_parallel:
        hidden = gather_sequence(hidden, call.group)
    scale = None if row_scale is None else row_scale.reshape(-1)
    return Batch(hidden.reshape(-1, hidden.shape[-1]), weight, bias, target.reshape(-1), scale)


class LinearCrossEntropy(torch.autograd.Function):
    """Loss and outputs per row from hidden states and this rank's weight, and the gradients of both.

    Per rank: hidden [.., H] (or [s / W, .., H]), weight [V_local, H], bias [V_local], target [..] -> loss [..] float32
    and `call.problem.outputs` [..], bit-identical on all ranks of the group.

    Forward: x = hidden weight^T + bias, rounded to their dtype, chunk by chunk; then as the loss on logits.
    Gradient, with G that of x as the loss on logits has it, rounded once to the dtype:
        dhidden = sum over ranks of G weight,  dweight = G^T hidden,  dbias = sum over rows of G

    Saved for backward: hidden (this rank's part; all of it where it needs no gradient), weight, bias, target, 8 bytes a
    row (12 with the entropy), the rows' scale, and as many chunks of x as `keep` has room for.
    Collectives: forward gathers the statistics, with sequence parallelism the hidden states before. Where hidden needs
    a gradient, backward gathers these again and sums dhidden over the ranks; else it has none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        row_scale: Tensor | None,
        call: LinearCall,
        is_differentiable: bool,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            batch = whole_batch(hidden, weight, bias, target, row_scale, call)
            loss, saved, outputs, kept = row_loss(batch, target, call, is_differentiable)
        count_loss(call.backend.name)
        names = call.problem.outputs
        ctx.mark_non_differentiable(
            *(output for name, output in zip(names, outputs, strict=True) if name in FOR_LOGGING)
        )
        if is_differentiable:
            # Where backward sums nothing over the ranks it gathers nothing either: some may have no backward at all.
            ctx.hidden_is_whole = call.sequence_parallel and not ctx.needs_input_grad[0]
            saved_hidden = batch.hidden if ctx.hidden_is_whole else hidden
            ctx.save_for_backward(saved_hidden, weight, bias, target, row_scale, saved, *kept)
            ctx.call, ctx.spoiled = call, None
            ctx.set_materialize_grads(False)
        return loss, *outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        hidden, weight, bias, target, row_scale, saved, *kept = ctx.saved_tensors
        needed = Needed(*ctx.needs_input_grad[:3])
        grads = output_grads(call.problem.outputs, grad_outputs)
        if all(grad is None for grad in grads):
            return (None,) * 7
        flat = OutputGrads(*(None if grad is None else grad.reshape(-1) for grad in grads))
        if saved.is_cuda:
            # cuBLAS warns where it is the first in a thread to use the device, and autograd's threads are new.
            saved.new_zeros(1)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            if ctx.hidden_is_whole:
                call = call._replace(sequence_parallel=False)
            batch = whole_batch(hidden, weight, bias, target, row_scale, call)
            overwrites_kept = bool(kept) and not _graph_is_kept() and not _is_captured(saved)
            # Before the first write, and not by a version, which nobody looks at where hooks have what is saved.
            if ctx.spoiled is not None:
                raise RuntimeError(f"linear loss: interrupted in backward, which {ctx.spoiled}; compute the loss again")
            if needed.weight and call.weight_gradient is not None:
                ctx.spoiled = "adds to the weight's gradient chunk by chunk: set that to what it was"
            elif overwrites_kept:
                ctx.spoiled = "overwrites the logits it kept"
            of_hidden, of_weight, of_bias = gradients(batch, flat, saved, kept, call, needed, overwrites_kept)
            if not overwrites_kept:
                ctx.spoiled = None
            if of_hidden is not None:
                of_hidden = of_hidden.to(hidden.dtype).view(hidden.shape)
        results = [of_hidden, of_weight, of_bias]
        if torch.is_grad_enabled():  # create_graph=True
            inputs = [each for each in (hidden, weight, bias, *grads) if each is not None]
            results = [None if each is None else forbid_second_derivative(each, *inputs) for each in results]
        return (*results, None, None, None, None)


def _is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is captured, whose backward may be replayed more than once after one forward."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _graph_is_kept() -> bool:
    """Whether another backward may come, which needs the kept logits; True where torch doesn't tell."""
    try:
        return bool(torch._C._autograd._get_current_graph_task_keep_graph())
    except (AttributeError, RuntimeError):
        return True
