"""The public fused linear + loss: hidden states and the weight of the output layer in, the loss out, no logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from te_ce.agreement import raise_for_faults, tell_other_ranks
from te_ce.groups import Group, resolve_group
from te_ce.layout import readable
from te_ce.linear.call import (
    LinearCall,
    LinearRequest,
    LinearTensors,
    autocast_to_one_dtype,
    resolve_linear_call,
)
from te_ce.linear.chunks import Keep
from te_ce.linear.nodes import LinearCrossEntropy
from te_ce.linear.weight_gradient import WeightGradient
from te_ce.linear.weighted_node import WeightedLinearCrossEntropy
from te_ce.options import LossOptions, resolve_options
from te_ce.outputs import LossOutput, resolve_outputs
from te_ce.reduction import reduce_loss
from te_ce.shard import VocabShard


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = ...,
    group: Group = ...,
    sequence_parallel: bool = ...,
    keep: Keep = ...,
    token_weights: Tensor | None = ...,
    options: LossOptions | None = ...,
    shard: VocabShard | None = ...,
    outputs: tuple[()] = ...,
    **loss_options: Any,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = ...,
    group: Group = ...,
    sequence_parallel: bool = ...,
    keep: Keep = ...,
    token_weights: Tensor | None = ...,
    options: LossOptions | None = ...,
    shard: VocabShard | None = ...,
    outputs: Iterable[str],
    **loss_options: Any,
) -> LossOutput: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    group: Group = None,
    sequence_parallel: bool = False,
    keep: Keep = "recompute",
    token_weights: Tensor | None = None,
    options: LossOptions | None = None,
    shard: VocabShard | None = None,
    outputs: Iterable[str] = (),
    **loss_options: Any,
) -> Tensor | LossOutput:
    """Cross-entropy of the logits hidden weight^T + bias, which are never held as a whole.

    Args:
        hidden: [.., H] float32, bfloat16, float16 or float64, the same on every rank of `group`; or with
            `sequence_parallel` [s / W, .., H], this rank's part.
        weight: [V_local, H], of hidden's dtype: this rank's rows. Under torch.autocast both are cast as by `F.linear`.
        target: [..] int64 or int32, global class ids of all rows, the same on every rank.
        bias: [V_local], or None.
        group, options, shard, outputs, loss_options: see `te_ce.vocab_parallel_cross_entropy`; not `reproducible_tp`.
        sequence_parallel: hidden is sharded along its first dimension: gathered here, its gradient reduce-scattered.
        keep: logits kept from forward to backward, of which the others are made twice: "recompute" (none of them), a
            share of the chunks from 0.0 to 1.0, or a budget in bytes.
        token_weights: w [..] bools or floats, the weight of every row's loss in the scalar that is returned. Then the
            gradients are made in forward, every logit once, and `keep` has no effect; outputs are for logging.

    Returns:
        As `te_ce.vocab_parallel_cross_entropy`; with `token_weights` the scalar sum(w L), or for "mean" that over the
        number of rows not ignored. The gradient of hidden is summed over the group. Differentiable once.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `te_ce.vocab_parallel_cross_entropy`.

    The logits are rounded to hidden's dtype, as an output layer rounds them; all sums of products are in float32 and
    rounded once. torch.compile breaks the graph here.
    Collectives: one all-gather of the statistics in forward (with `token_weights` one for each chunk of tokens), one
    sum of hidden's gradient, both ways of sequence parallelism.
    """
    return linear_cross_entropy_into(
        None,
        LinearTensors(hidden, weight, bias, target, None, token_weights),
        LinearArguments(group, options, shard, outputs, sequence_parallel, keep),
        loss_options,
    )


class LinearArguments(NamedTuple):
    """Arguments of `linear_cross_entropy` as the caller gave them, but for the tensors and the loss options."""

    group: Group = None
    options: LossOptions | None = None
    shard: VocabShard | None = None
    outputs: Iterable[str] = ()
    sequence_parallel: bool = False
    keep: Keep = "recompute"


@torch._disable_dynamo  # type: ignore[attr-defined]
def linear_cross_entropy_into(
    weight_gradient: Callable[[], WeightGradient] | None,
    tensors: LinearTensors,
    arguments: LinearArguments,
    loss_options: dict[str, Any],
) -> Tensor | LossOutput:
    """`linear_cross_entropy` whose weight's gradient goes where the caller says; for frameworks with buffers of theirs.

    Args:
        weight_gradient: makes what takes the weight's gradient, for every backward; not with token_weights. None: a new
            tensor for autograd.
        tensors: `row_scale` is to be None, as it is one of the options.
    """
    group, options, shard, outputs, sequence_parallel, keep = arguments
    ranks = resolve_group(group)
    try:
        resolved, row_scale = resolve_options(options, loss_options)
        tensors = autocast_to_one_dtype(tensors._replace(row_scale=row_scale))
        names = resolve_outputs(outputs)
        request = LinearRequest(ranks, resolved, shard, names, sequence_parallel, keep, weight_gradient)
        call = resolve_linear_call(tensors, request)
    except Exception as error:
        tell_other_ranks(error, tensors.hidden, ranks, options, loss_options)
        raise
    if call.record is not None:
        raise_for_faults(tensors.target, row_scale, call.record, call.problem, call.group)
    loss, *others = _apply(tensors, call)
    if tensors.token_weights is None:
        loss = reduce_loss(loss, tensors.target, resolved.reduction, resolved.ignore_index)
    return LossOutput(loss, **dict(zip(names, others, strict=True))) if names else loss


def _apply(tensors: LinearTensors, call: LinearCall) -> tuple[Tensor, ...]:
    hidden, weight, bias, target, row_scale, token_weights = tensors
    target, row_scale = readable(target), None if row_scale is None else readable(row_scale)
    is_differentiable = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (hidden, weight, bias)
    )
    if token_weights is None:
        of_rows: tuple[Tensor, ...] = LinearCrossEntropy.apply(
            hidden, weight, bias, target, row_scale, call, is_differentiable
        )
        return of_rows
    loss, *outputs = WeightedLinearCrossEntropy.apply(
        hidden, weight, bias, target, row_scale, readable(token_weights), call, is_differentiable
    )
    return loss, *(output.view(target.shape) for output in outputs)
