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

from te_ce.autograd import Inplace, LossCall, forward
from te_ce.call import check_targets, resolve_call
from te_ce.checks import check_inplace
from te_ce.layout import readable
from te_ce.options import LossOptions, resolve_options
from te_ce.reduction import reduce_loss
from te_ce.shard import VocabShard


def loss_in_graph(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None,
    options: LossOptions | None,
    shard: VocabShard | None,
    inplace: Inplace,
    loss_options: dict[str, Any],
) -> Tensor:
    """The loss as nodes of a graph. Traced: tensors and shard are checked by the operator, when it runs."""
    check_inplace(inplace, logits)
    resolved = resolve_options(options, loss_options)
    loss, _ = _loss(
        logits,
        target,
        resolved.ignore_index,
        float(resolved.label_smoothing),
        resolved.smoothing,
        resolved.vocab_size,
        resolved.check_targets,
        None if group is None else group.group_name,
        None if shard is None else [shard.start, shard.stop, shard.size],
    )
    return reduce_loss(loss, target, resolved.reduction, resolved.ignore_index)


@library.custom_op("te_ce::loss", mutates_args=())
def _loss(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    smoothing: str,
    vocab_size: int | None,
    must_check_targets: bool,
    group: str | None,
    shard: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Loss [..] per row and saved [2, N]; float32, or float64 for float64 logits. One all-gather over `group`."""
    options = _options(ignore_index, label_smoothing, smoothing, vocab_size, must_check_targets)
    logits, target, call = _call(logits, target, options, group, shard)
    check_targets(target, call)
    return forward(logits, target, call)


@library.custom_op("te_ce::logits_gradient", mutates_args=())
def _logits_gradient(
    logits: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    saved: Tensor,
    ignore_index: int,
    label_smoothing: float,
    smoothing: str,
    vocab_size: int | None,
    group: str | None,
    shard: list[int] | None,
) -> Tensor:
    """Gradient of the logits, contiguous, of their shape and dtype."""
    options = _options(ignore_index, label_smoothing, smoothing, vocab_size, False)
    logits, target, call = _call(logits, target, options, group, shard)
    out = logits.new_empty(logits.shape)
    call.backend.logits_gradient(logits, target, readable(grad_loss), saved, out, call.problem)
    return out


def _options(
    ignore_index: int, label_smoothing: float, smoothing: str, vocab_size: int | None, check_targets: bool
) -> LossOptions:
    return LossOptions(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        smoothing=smoothing,  # type: ignore[arg-type]
        vocab_size=vocab_size,
        check_targets=check_targets,
    )


def _call(
    logits: Tensor, target: Tensor, options: LossOptions, group: str | None, shard: list[int] | None
) -> tuple[Tensor, Tensor, LossCall]:
    process_group = None if group is None else c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    return resolve_call(logits, target, process_group, options, None if shard is None else VocabShard(*shard), False)


# A rank that does not use its loss must take part in the all-gather all the same, and hear of bad targets.
torch.fx.node.has_side_effect(torch.ops.te_ce.loss.default)


@_loss.register_fake
def _loss_shapes(logits: Tensor, target: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(target.shape, dtype=dtype), logits.new_empty((2, target.numel()), dtype=dtype)


@_logits_gradient.register_fake
def _logits_gradient_shape(logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ignore_index, label_smoothing, smoothing, vocab_size, _, group, shard = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.arguments = (ignore_index, label_smoothing, smoothing, vocab_size, group, shard)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, grad_saved: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, target, saved = ctx.saved_tensors
    if grad_loss is None:
        return (None,) * 9
    return (_logits_gradient(logits, target, grad_loss, saved, *ctx.arguments), *(None,) * 8)


_loss.register_autograd(_backward, setup_context=_save)
