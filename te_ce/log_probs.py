"""Log-probabilities and entropies of sharded logits, for reinforcement learning."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from te_ce.agreement import tell_other_ranks
from te_ce.autograd import Inplace
from te_ce.groups import Group, resolve_group
from te_ce.loss import vocab_parallel_cross_entropy
from te_ce.options import LossOptions
from te_ce.shard import VocabShard

# Options that change the loss and nothing else.
_OF_THE_LOSS = ("label_smoothing", "smoothing", "z_loss_weight", "reduction")
_DEFAULTS = LossOptions()


@overload
def vocab_parallel_log_probs(
    logits: Tensor,
    target: Tensor,
    *,
    group: Group = ...,
    options: LossOptions | None = ...,
    shard: VocabShard | None = ...,
    inplace: Inplace = ...,
    entropy: Literal[False] = ...,
    **loss_options: Any,
) -> Tensor: ...


@overload
def vocab_parallel_log_probs(
    logits: Tensor,
    target: Tensor,
    *,
    group: Group = ...,
    options: LossOptions | None = ...,
    shard: VocabShard | None = ...,
    inplace: Inplace = ...,
    entropy: Literal[True],
    **loss_options: Any,
) -> tuple[Tensor, Tensor]: ...


def vocab_parallel_log_probs(
    logits: Tensor,
    target: Tensor,
    *,
    group: Group = None,
    options: LossOptions | None = None,
    shard: VocabShard | None = None,
    inplace: Inplace = "auto",
    entropy: bool = False,
    **loss_options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of every target, and the entropy of its row: log p_y = z_y - lse, H = -sum p_i log p_i.

    Both come from one read of the logits and share one backward, for any subset that gets a gradient. z is the logits
    after `softcap` and `scale` (1 / temperature), the same for both.

    Args:
        logits, target, group, options, shard, inplace, loss_options: see `te_ce.vocab_parallel_cross_entropy`.
        entropy: return the entropy as well.

    Returns:
        log-probabilities [..] float32 (float64 for float64 logits), or (log-probabilities, entropies). 0 in ignored
        rows; NaN where the target is neither a class nor `ignore_index`.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `vocab_parallel_cross_entropy`.
        TypeError: `entropy` is not a bool.
        ValueError: an option that would have no effect (label smoothing, z-loss, reduction) is not at its default.

    Collectives: one all-gather of 12 bytes a row (16 with the entropy) in forward, none in backward.
    """
    try:
        _check(entropy, options, loss_options)
    except Exception as error:
        if not torch.compiler.is_compiling():
            tell_other_ranks(error, logits, resolve_group(group), options, loss_options)
        raise
    names = ("log_probs", "entropy") if entropy else ("log_probs",)
    result = vocab_parallel_cross_entropy(
        logits, target, group=group, options=options, shard=shard, outputs=names, inplace=inplace, **loss_options
    )
    assert result.log_probs is not None
    if not entropy:
        return result.log_probs
    assert result.entropy is not None
    return result.log_probs, result.entropy


def _check(entropy: object, options: LossOptions | None, loss_options: dict[str, Any]) -> None:
    if "outputs" in loss_options:
        raise TypeError("unexpected keyword 'outputs': log-probs are returned, and with entropy=True entropies too")
    if not isinstance(entropy, bool):
        raise TypeError(f"entropy: expected a bool, got {type(entropy).__name__}")
    for name in _OF_THE_LOSS:
        value = loss_options.get(name, _of(options, name))
        if value != getattr(_DEFAULTS, name):
            raise ValueError(f"{name}: expected {getattr(_DEFAULTS, name)!r}, as it changes no log-prob, got {value!r}")


def _of(options: LossOptions | None, name: str) -> Any:
    # Whatever else `options` may be is for the loss to refuse.
    return getattr(options if isinstance(options, LossOptions) else _DEFAULTS, name)
