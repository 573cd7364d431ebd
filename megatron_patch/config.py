"""Whether a Megatron configuration asks for te_ce, and the refusal of settings that would be silently dead.

Megatron reads `cross_entropy_fusion_impl` only where `cross_entropy_loss_fusion` is on, and does not check the value:
without this check a run meant for te_ce would train with Megatron's own loss, or fail later on an unbound variable.
The check runs when a configuration is made after the patch, and again at every loss, because configurations are
also made before it and changed by assignment (megatron-core 0.10 has no such field: there it is set that way).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patch.application import Application

IMPLEMENTATION = "te_ce"
"""The loss on logits."""
LINEAR = "te_ce_linear"
"""The loss fused with the output layer."""


def asks_for_te_ce(config: Any) -> bool:
    """True if `config` asks for te_ce's loss, of either kind, False if it asks for anything of Megatron's own.

    Args:
        config: a TransformerConfig, or anything with its attributes.

    Raises:
        ValueError: the implementation is te_ce but `cross_entropy_loss_fusion` is off, or it is a te_ce variant
            that does not exist.
    """
    implementation = getattr(config, "cross_entropy_fusion_impl", None)
    if not isinstance(implementation, str):
        return False
    if not implementation.lower().replace("-", "_").startswith(IMPLEMENTATION):
        return False
    if implementation not in (IMPLEMENTATION, LINEAR):
        raise ValueError(
            f'cross_entropy_fusion_impl: expected "{IMPLEMENTATION}" (the loss on logits) or "{LINEAR}" (fused with '
            f"the output layer), got {implementation!r}"
        )
    if not getattr(config, "cross_entropy_loss_fusion", False):
        raise ValueError(
            f'cross_entropy_fusion_impl="{implementation}" has no effect while cross_entropy_loss_fusion is off; '
            "set cross_entropy_loss_fusion=True as well"
        )
    return True


def asks_for_linear(config: Any) -> bool:
    """True if `config` asks for te_ce's loss fused with the output layer. Raises as `asks_for_te_ce` does."""
    return asks_for_te_ce(config) and config.cross_entropy_fusion_impl == LINEAR


def check_keep_is_used(config: Any, keep: object) -> None:
    """Refuse a `keep` for a configuration whose loss is computed on logits, which nobody drops.

    Raises:
        ValueError: `keep` is not the usual "recompute", and `config` asks for te_ce on logits.
    """
    if keep != "recompute" and asks_for_te_ce(config) and not asks_for_linear(config):
        raise ValueError(
            f'keep: expected "recompute" for cross_entropy_fusion_impl="{IMPLEMENTATION}", the loss on logits, got '
            f'{keep!r}; set cross_entropy_fusion_impl="{LINEAR}"'
        )


def asks_for_transformer_engine(config: Any) -> bool:
    """Whether `config`, a TransformerConfig or Megatron's arguments, asks for Transformer Engine's loss."""
    return (
        bool(getattr(config, "cross_entropy_loss_fusion", False))
        and getattr(config, "cross_entropy_fusion_impl", None) == "te"
    )


def check_after(original: Callable[..., None], application: Application) -> Callable[..., None]:
    """`ModelParallelConfig.__post_init__`, followed by the checks; only the original once reverted."""

    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if application.active:
            asks_for_te_ce(self)
            check_keep_is_used(self, application.keep)

    return __post_init__
