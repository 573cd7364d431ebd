"""The loss as custom operators, which torch.compile takes into its graph whole.

Eager calls do not come here: an operator can't know who else holds the logits, so its gradient always takes a buffer of
its own. Everything but the tensors is resolved when the operator runs, from plain numbers and names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
import torch.fx.node
from torch import Tensor, library
from torch.distributed import ProcessGroup

from te_ce.agreement import tell_other_ranks
from te_ce.autograd import LossCall, forward
from te_ce.call import Request, check_targets, resolve_call
from te_ce.checks import check_inplace
from te_ce.layout import readable
from te_ce.options import LossOptions
from te_ce.outputs import OUTPUTS, LossOutput, OutputGrads
from te_ce.reduction import reduce_loss
from te_ce.shard import VocabShard

_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def loss_in_graph(logits: Tensor, target: Tensor, row_scale: Tensor | None, request: Request) -> Tensor | LossOutput:
    """The loss as nodes of a graph. Traced: tensors and shard are checked by the operator, when it runs."""
    check_inplace(request.inplace, logits)
    group, options, shard = request.group, request.options, request.shard
    loss, _, *others = _loss(
        logits,
        target,
        row_scale,
        options.ignore_index,
        float(options.label_smoothing),
        options.smoothing,
        float(options.z_loss_weight),
        None if options.softcap is None else float(options.softcap),
        float(options.scale),
        options.vocab_size,
        options.check_targets,
        options.reduction,
        options.reproducible_tp,
        " ".join(request.outputs),
        None if group is None else group.group_name,
        None if shard is None else [shard.start, shard.stop, shard.size],
    )
    loss = reduce_loss(loss, target, options.reduction, options.ignore_index)
    if not request.outputs:
        return loss
    return LossOutput(loss, *(others[OUTPUTS.index(name)] if name in request.outputs else None for name in OUTPUTS))


@library.custom_op("te_ce::loss", mutates_args=())
def _loss(
    logits: Tensor,
    target: Tensor,
    row_scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    smoothing: str,
    z_loss_weight: float,
    softcap: float | None,
    scale: float,
    vocab_size: int | None,
    must_check_targets: bool,
    reduction: str,  # not done here: for the ranks to agree on
    reproducible_tp: bool,
    outputs: str,  # names
    group: str | None,
    shard: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss [..] per row, what is saved [.., N], and the outputs in the order of `OUTPUTS`, empty where not asked for.

    float32, or float64 for float64 logits; predictions int64. One all-gather over `group`.
    """
    of_gradient = (ignore_index, label_smoothing, smoothing, z_loss_weight, softcap, scale, vocab_size, reproducible_tp)
    options = _options(*of_gradient, check_targets=must_check_targets, reduction=reduction)
    try:
        logits, target, row_scale, call = _call(logits, target, row_scale, options, outputs, group, shard)
    except Exception as error:
        tell_other_ranks(error, logits, None if group is None else _process_group(group), options, {})
        raise
    check_targets(target, row_scale, call)
    loss, saved, others = forward(logits, target, call, row_scale)
    of_name = dict(zip(call.problem.outputs, others, strict=True))
    return loss, saved, *(of_name[name] if name in of_name else _absent(loss, name) for name in OUTPUTS)  # type: ignore[return-value]


@library.custom_op("te_ce::logits_gradient", mutates_args=())
def _logits_gradient(
    logits: Tensor,
    target: Tensor,
    row_scale: Tensor | None,
    grad_loss: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    saved: Tensor,
    ignore_index: int,
    label_smoothing: float,
    smoothing: str,
    z_loss_weight: float,
    softcap: float | None,
    scale: float,
    vocab_size: int | None,
    reproducible_tp: bool,
    outputs: str,  # names
    group: str | None,
    shard: list[int] | None,
) -> Tensor:
    """Gradient of the logits, contiguous, of their shape and dtype."""
    options = _options(
        ignore_index, label_smoothing, smoothing, z_loss_weight, softcap, scale, vocab_size, reproducible_tp
    )
    logits, target, row_scale, call = _call(logits, target, row_scale, options, outputs, group, shard)
    given = (grad_loss, grad_log_probs, grad_entropy, grad_lse)
    grads = OutputGrads(*(None if grad is None else readable(grad) for grad in given))
    out = logits.new_empty(logits.shape)
    call.backend.logits_gradient(logits, target, grads, saved, out, call.problem, row_scale)
    return out


# The options that a gradient depends on, in the order of the operators' arguments.
_OF_GRADIENT = (
    "ignore_index",
    "label_smoothing",
    "smoothing",
    "z_loss_weight",
    "softcap",
    "scale",
    "vocab_size",
    "reproducible_tp",
)


def _options(*of_gradient: Any, **others: Any) -> LossOptions:
    return LossOptions(**dict(zip(_OF_GRADIENT, of_gradient, strict=True)), **others)


def _call(
    logits: Tensor,
    target: Tensor,
    row_scale: Tensor | None,
    options: LossOptions,
    outputs: str,
    group: str | None,
    shard: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor | None, LossCall]:
    process_group = None if group is None else _process_group(group)
    columns = None if shard is None else VocabShard(*shard)
    return resolve_call(
        logits, target, row_scale, Request(process_group, options, columns, False, tuple(outputs.split()))
    )


def _absent(loss: Tensor, name: str) -> Tensor:
    return loss.new_empty(0, dtype=torch.int64 if name == "predictions" else loss.dtype)


def _process_group(name: str) -> ProcessGroup:
    return c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


# A rank that does not use its loss must take part in the all-gather all the same, and hear of bad targets.
torch.fx.node.has_side_effect(torch.ops.te_ce.loss.default)


@_loss.register_fake
def _loss_shapes(logits: Tensor, target: Tensor, *arguments: Any) -> _Results:
    outputs = arguments[-3].split()
    loss = logits.new_empty(target.shape, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    saved = loss.new_empty((3 if "entropy" in outputs else 2, target.numel()))
    others = [
        _absent(loss, name)
        if name not in outputs
        else torch.empty_like(loss, dtype=torch.int64 if name == "predictions" else loss.dtype)
        for name in OUTPUTS
    ]
    return loss, saved, *others  # type: ignore[return-value]


@_logits_gradient.register_fake
def _logits_gradient_shape(logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Results) -> None:
    logits, target, row_scale, *options, vocab_size, _, _, reproducible_tp, outputs, group, shard = inputs
    ctx.save_for_backward(logits, target, row_scale, output[1])
    ctx.arguments = (*options, vocab_size, reproducible_tp, outputs, group, shard)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1], output[5], output[6])


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, target, row_scale, saved = ctx.saved_tensors
    loss, _, log_probs, entropy, lse, _, _ = grads
    outputs = ctx.arguments[-3].split()
    # Of an output that was not asked for, a gradient may come that is as empty as the output.
    given = {"log_probs": log_probs, "entropy": entropy, "lse": lse}
    of_outputs = [grad if name in outputs else None for name, grad in given.items()]
    if loss is None and all(grad is None for grad in of_outputs):
        return (None,) * len(ctx.needs_input_grad)
    grad_logits = _logits_gradient(logits, target, row_scale, loss, *of_outputs, saved, *ctx.arguments)
    return (grad_logits, *(None,) * (len(ctx.needs_input_grad) - 1))


_loss.register_autograd(_backward, setup_context=_save)
