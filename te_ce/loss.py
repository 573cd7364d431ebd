"""The public loss on logits: hands over to the autograd node, or while torch.compile traces to the operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

import torch
from torch import Tensor

from te_ce.agreement import tell_other_ranks
from te_ce.autograd import Inplace, VocabParallelCrossEntropy
from te_ce.autograd_outputs import CrossEntropyWithOutputs
from te_ce.call import Request, check_targets, resolve_call
from te_ce.groups import Group, resolve_group
from te_ce.operators import loss_in_graph
from te_ce.options import LossOptions, resolve_options
from te_ce.outputs import LossOutput, resolve_outputs
from te_ce.reduction import reduce_loss
from te_ce.shard import VocabShard


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: Group = ...,
    options: LossOptions | None = ...,
    shard: VocabShard | None = ...,
    outputs: tuple[()] = ...,
    inplace: Inplace = ...,
    **loss_options: Any,
) -> Tensor: ...


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: Group = ...,
    options: LossOptions | None = ...,
    shard: VocabShard | None = ...,
    outputs: Iterable[str],
    inplace: Inplace = ...,
    **loss_options: Any,
) -> LossOutput: ...


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: Group = None,
    options: LossOptions | None = None,
    shard: VocabShard | None = None,
    outputs: Iterable[str] = (),
    inplace: Inplace = "auto",
    **loss_options: Any,
) -> Tensor | LossOutput:
    """Cross-entropy of logits whose columns are sharded over the ranks of `group`.

    Args:
        logits: [.., V_local] float32, bfloat16 or float16, this rank's columns; any strides with a contiguous last
            dimension are read in place, others are copied once. float64 is served by the plain-torch twin.
        target: [..] int64 or int32, global class ids, the same on every rank; any strides.
        group: the vocab-parallel ranks, in the order of their shards: a ProcessGroup, or a DeviceMesh of one
            dimension. None: this rank holds the whole vocabulary.
        options: see `LossOptions`; or give its fields as keywords (`label_smoothing=0.1`), not both.
        shard: the columns this rank holds. None: equal shards of V_local columns.
        outputs: names of what else is wanted of the same one read of the logits, see `LossOutput`: "log_probs",
            "entropy", "lse", "z_loss", "predictions".
        inplace: whether the gradient overwrites the logits' storage. "auto": where nobody else can still see it, which
            is decided in backward; a CUDA stream that still reads logits nobody holds any more cannot be seen; never
            under torch.compile. False: never. True: always; a later use of the logits by autograd, or a second
            backward, raises; under torch.compile it breaks the graph.

    Returns:
        float32 (float64 for float64 logits): [..] for reduction "none", a scalar for "sum" and "mean"; with `outputs` a
        `LossOutput`. Every rank has the same bits. Rows whose target is neither a class nor `ignore_index` are NaN.
        Where logits differ by more than float32 can hold, the loss is inf. Differentiable once.

    Raises:
        TypeError, ValueError: an argument is wrong; names it, what was expected and what it was; before any collective.
        IndexError: with check_targets, on every rank, where any has a bad target; names rank, row (over all leading
            dimensions) and value. ValueError: where ranks disagree; names the argument and every rank's value.
            RuntimeError: where another rank raised one of the errors above; names both.

    Collectives: one all-gather of 12 bytes a row (8 more with smoothing, 4 more each with the entropy and the
    predictions) in forward, none in backward; one more of 1024 bytes first with check_targets, which must be asked for
    on every rank or on none. An error that torch.compile comes upon while it traces is not told to the other ranks.
    """
    if not torch.compiler.is_compiling():
        return _eager_loss(logits, target, group, options, shard, outputs, inplace, loss_options)
    if inplace is True:
        return _eager_loss_outside_the_graph(logits, target, group, options, shard, outputs, inplace, loss_options)
    resolved, row_scale = resolve_options(options, loss_options)
    request = Request(resolve_group(group), resolved, shard, inplace, resolve_outputs(outputs))
    return loss_in_graph(logits, target, row_scale, request)


def _eager_loss(
    logits: Tensor,
    target: Tensor,
    group: Group,
    options: LossOptions | None,
    shard: VocabShard | None,
    outputs: Iterable[str],
    inplace: Inplace,
    loss_options: dict[str, Any],
    node: type[torch.autograd.Function] = VocabParallelCrossEntropy,
) -> Tensor | LossOutput:
    # Every time: a group may have been destroyed since.
    ranks = resolve_group(group)
    try:
        resolved, row_scale = resolve_options(options, loss_options)
        names = () if outputs == () else resolve_outputs(outputs)
        request = Request(ranks, resolved, shard, inplace, names)
        logits, target, row_scale, call = resolve_call(logits, target, row_scale, request)
    except Exception as error:
        tell_other_ranks(error, logits, ranks, options, loss_options)
        raise
    check_targets(target, row_scale, call)
    if not names:
        loss: Tensor = node.apply(logits, target, call, row_scale)
        return reduce_loss(loss, target, resolved.reduction, resolved.ignore_index)
    loss, *others = CrossEntropyWithOutputs.apply(logits, target, call, row_scale)
    loss = reduce_loss(loss, target, resolved.reduction, resolved.ignore_index)
    return LossOutput(loss, **dict(zip(names, others, strict=True)))


# Reference counts and raw writes into the logits' storage are not for a compiler to trace.
_eager_loss_outside_the_graph = torch._disable_dynamo(_eager_loss)  # type: ignore[attr-defined]
