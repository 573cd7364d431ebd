"""Stand-ins for Megatron's own vocab-parallel losses, for code that cannot set the flag.

Each of Megatron's two functions looks its autograd class up by name when called and uses nothing of it but `.apply`.
Replacing that class therefore reaches every caller, also one that imported the function long before. The functions
themselves are replaced as well wherever a module holds them, so that what a reader finds there is what runs.

Arguments are those of Megatron: logits [s, b, V / TP] (or [b, s, V / TP]) and target of the leading shape; returns the
float32 per-token loss of the target's shape. Differences, all on purpose: negative labels are ignored rows; label
smoothing is over the whole vocabulary, not the shard's; float32 logits are not overwritten in forward; the gradient
has the dtype of the logits (the fused original always makes bfloat16).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_patch.application import Application
from megatron_patch.deferred import plain
from megatron_patch.model import global_group, ignore_negative
from te_ce import LossOptions, vocab_parallel_cross_entropy


def native_loss(
    logits: Tensor, target: Tensor, label_smoothing: float, tp_group: ProcessGroup | None, options: LossOptions
) -> Tensor:
    """Megatron's loss by te_ce; a `label_smoothing` above 0 overrides the options' and follows Megatron's formula."""
    if label_smoothing != 0.0:
        options = dataclasses.replace(options, label_smoothing=label_smoothing, smoothing="others")
    group = global_group() if tp_group is None else tp_group
    return vocab_parallel_cross_entropy(
        plain(logits), ignore_negative(target, options), group=group, options=options, inplace="auto"
    )


def make_unfused(application: Application) -> Callable[..., Tensor]:
    """The loss with the arguments of `vocab_parallel_cross_entropy`, and of its autograd class's `apply`."""

    def unfused(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        tp_group: ProcessGroup | None = None,
    ) -> Tensor:
        return native_loss(vocab_parallel_logits, target, label_smoothing, tp_group, application.options)

    return unfused


def make_fused(application: Application) -> Callable[..., Tensor]:
    """The loss with the arguments of `fused_vocab_parallel_cross_entropy`, and of its autograd class's `apply`."""

    def fused(vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
        return native_loss(vocab_parallel_logits, target, 0.0, tp_group, application.options)

    return fused


def stand_in_function(original: Callable[..., Tensor], loss: Callable[..., Tensor], application: Application) -> Any:
    """A function with the original's name and signature that calls `loss`, or the original once reverted."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Tensor:
        return loss(*args, **kwargs) if application.active else original(*args, **kwargs)

    return function


def stand_in_class(original: Any, loss: Callable[..., Tensor], application: Application) -> Any:
    """A class with nothing but `apply`, which calls `loss`, or the original's once reverted."""

    def apply(*args: Any) -> Tensor:
        return loss(*args) if application.active else original.apply(*args)

    members = {"apply": staticmethod(apply), "__module__": __name__, "__doc__": loss.__doc__}
    return type(original.__name__, (), members)
