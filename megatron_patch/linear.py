"""The loss from deferred logits: te_ce's fused linear loss on the output layer's input and weight.

    hidden [s, b, H] (or [s / TP, b, H])   the layer's input; its gradient comes back summed over the group, as the
                                           layer's own does, so that nothing of Megatron's communication is around it
    weight [V / TP, H]                     the one that the layer was called with: its own, or the embedding's
    labels [b, s] -> loss [b, s]           float32, contiguous, as Megatron returns it

Which path serves the loss is in the log once, with the reason where it is not this one, and in `status()`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

from torch import Tensor

from megatron_patch.application import Application
from megatron_patch.deferred import DeferredLogits
from megatron_patch.errors import PatchError
from megatron_patch.log import announce
from megatron_patch.main_grad import MainGradient
from megatron_patch.model import ignore_negative
from megatron_patch.output_layer import layer_group
from megatron_patch.scope import current_scope, output_layers
from te_ce import LossOptions
from te_ce.linear.call import LinearTensors
from te_ce.linear_loss import LinearArguments, linear_cross_entropy_into

FUSED, ON_LOGITS = "fused", "on logits"


def linear_loss(labels: Tensor, logits: DeferredLogits, application: Application) -> Tensor:
    """Per-token loss of logits that nobody has changed.

    Args:
        labels: [b, s] int64 or int32, any strides, not written to. Negative: loss and gradient 0.
        logits: [s, b, V / TP], deferred.
        application: gives te_ce's options, and `keep`.

    Returns:
        [b, s] float32, contiguous.

    Raises:
        ValueError, IndexError: te_ce's own. RuntimeError: the layer's input or weight was changed in place since.

    Collectives: those of the fused loss, over the output layer's tensor-parallel group, in forward and backward.
    """
    origin = logits.origin
    origin.check_unchanged()
    options = times(application.options, origin.scale)
    target = ignore_negative(labels.transpose(0, 1), options)
    weight, layer = origin.weight, origin.layer
    gradient = None
    if layer.gradient_accumulation_fusion and weight.requires_grad:
        gradient = functools.partial(MainGradient, weight, getattr(weight, "main_grad", None))
    tensors = LinearTensors(origin.hidden, weight, origin.bias, target, None, None)
    arguments = LinearArguments(
        layer_group(layer), options, sequence_parallel=layer.sequence_parallel, keep=application.keep
    )
    loss = cast(Tensor, linear_cross_entropy_into(gradient, tensors, arguments, {}))
    application.heads[FUSED] += 1
    announce("te_ce_linear: the loss is fused with the output layer, whose logits are not computed", application)
    return loss.transpose(0, 1).contiguous()


def times(options: LossOptions, factor: float) -> LossOptions:
    """The options of the loss on x that is the loss with `options` on factor x.

    scale cap tanh(f x / cap) = (scale f) c tanh(x / c), with c = cap / |f|.
    """
    if factor == 1.0:
        return options
    cap = options.softcap
    return dataclasses.replace(
        options, scale=options.scale * factor, softcap=None if cap is None else cap / abs(factor)
    )


def report_logits(model: Any, logits: Tensor, application: Application) -> None:
    """Record that a loss asked for as te_ce_linear is about to be computed on `logits`, and why; once in the log.

    Raises:
        PatchError: with `strict`, or with a `keep` that cannot be honoured, instead.
    """
    reason = _reason(model, logits)
    if application.keep != "recompute":
        raise PatchError(f"te_ce_linear: keep={application.keep!r} cannot be honoured: {reason}; leave keep out")
    if application.strict:
        raise PatchError(
            f'te_ce_linear: {reason}; set cross_entropy_fusion_impl="te_ce", or apply without strict to have the loss '
            "computed on logits"
        )
    application.heads[ON_LOGITS] += 1
    if reason not in application.reasons:
        application.reasons.append(reason)
    announce(f"te_ce_linear: the loss is computed on logits, because {reason}", application)


def _reason(model: Any, logits: Tensor) -> str:
    scope = current_scope()
    if isinstance(logits, DeferredLogits):
        return "the logits were changed, or their gradient asked for, before the loss"
    if scope is None or scope.model is not model:
        return "the logits were not made in a forward of the model with labels"
    if scope.reason is not None:
        return scope.reason
    kinds = [
        type(layer).__qualname__ + (" with a forward of its own" if "forward" in vars(layer) else "")
        for layer in output_layers(model)
    ]
    return f"they do not come straight from Megatron's output layer; the model's is {' or '.join(kinds) or 'missing'}"
