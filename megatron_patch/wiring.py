"""`LanguageModule.compute_language_model_loss`, served by te_ce when the model's configuration asks for it.

    labels [b, s] -> view [s, b]     negative labels become `ignore_index` (Megatron masks such rows after the loss,
                                     and 0 times NaN would survive a mask)
    logits [s, b, V / TP]            as they are: no copy, no cast
    loss   [s, b] -> [b, s]          float32, contiguous, as Megatron returns it

The method is the seam that every model of every release goes through, models already built and multi-token
prediction heads included. Where the configuration asks for nothing, the original method runs, untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from megatron_patch.agreement import agree_on_path
from megatron_patch.application import Application
from megatron_patch.config import asks_for_linear, asks_for_te_ce, asks_for_transformer_engine, check_keep_is_used
from megatron_patch.deferred import DeferredLogits, intact, plain
from megatron_patch.linear import linear_loss, report_logits
from megatron_patch.log import announce
from megatron_patch.model import ignore_negative, is_gathered, tensor_parallel_group
from te_ce import LossOptions, vocab_parallel_cross_entropy


def make_method(original: Callable[..., Tensor], application: Application) -> Callable[..., Tensor]:
    """The replacement for `compute_language_model_loss(self, labels, logits)`."""

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        if application.active and asks_for_linear(self.config):
            fused = intact(logits)
            agree_on_path(fused, logits, tensor_parallel_group(self), application)
            if fused:
                return linear_loss(labels, cast(DeferredLogits, logits), application)
            report_logits(self, logits, application)
        logits = plain(logits)
        if application.active and _is_ours(self, logits, application):
            if not asks_for_linear(self.config):  # of that the reason is said
                announce("te_ce: the loss is computed on logits", application)
            return language_model_loss(self, labels, logits, application.options)
        return original(self, labels, logits)

    return compute_language_model_loss


def _is_ours(model: Any, logits: Tensor, application: Application) -> bool:
    if asks_for_te_ce(model.config):
        check_keep_is_used(model.config, application.keep)
        return True
    if asks_for_transformer_engine(model.config):
        return application.replace_te
    # Megatron's own entry points cannot tell gathered logits from a shard; here the model is at hand to tell.
    return application.replace_native and is_gathered(model, logits, tensor_parallel_group(model))


def language_model_loss(model: Any, labels: Tensor, logits: Tensor, options: LossOptions) -> Tensor:
    """Per-token loss of a Megatron language model.

    Args:
        model: the LanguageModule; gives the tensor-parallel group and the width of the output layer.
        labels: [b, s] int64 or int32, any strides, not written to. Negative: loss and gradient 0.
        logits: [s, b, V / TP] of this rank, or [s, b, V] where the model gathers its output.
        options: te_ce's, with reduction "none".

    Returns:
        [b, s] float32, contiguous.

    Raises:
        ValueError: the width of `logits` is neither that of a shard nor of the vocabulary; or te_ce's own.
        IndexError: a label at or past V, with `check_targets`; without, that row's loss and gradient are NaN.

    Collectives: te_ce's one over the tensor-parallel group in forward; none where the logits are gathered.
    """
    group = tensor_parallel_group(model)
    if is_gathered(model, logits, group):
        group = None
    target = ignore_negative(labels.transpose(0, 1), options)
    loss = vocab_parallel_cross_entropy(logits, target, group=group, options=options, inplace="auto")
    return loss.transpose(0, 1).contiguous()
