"""The public loss on logits: hands over to the autograd node, or while torch.compile traces to the operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce.autograd import Inplace, VocabParallelCrossEntropy
from te_ce.call import check_targets, resolve_call
from te_ce.operators import loss_in_graph
from te_ce.options import LossOptions, resolve_options
from te_ce.reduction import reduce_loss
from te_ce.shard import VocabShard


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: ProcessGroup | None = None,
    options: LossOptions | None = None,
    shard: VocabShard | None = None,
    inplace: Inplace = "auto",
    **loss_options: Any,
) -> Tensor:
    """Cross-entropy of logits whose columns are sharded over the ranks of `group`.

    Args:
        logits: [.., V_local] float32, bfloat16 or float16, this rank's columns; any strides with a contiguous last
            dimension are read in place, others are copied once. float64 is served by the plain-torch twin.
        target: [..] int64 or int32, global class ids, the same on every rank; any strides.
        group: the vocab-parallel ranks, in the order of their shards. None: this rank holds the whole vocabulary.
        options: see `LossOptions`; or give its fields as keywords (`label_smoothing=0.1`), not both.
        shard: the columns this rank holds. None: equal shards of V_local columns.
        inplace: whether the gradient overwrites the logits' storage. "auto": where nobody else can still see it, which
            is decided in backward; a CUDA stream that still reads logits nobody holds any more cannot be seen; never
            under torch.compile. False: never. True: always; a later use of the logits by autograd, or a second
            backward, raises; under torch.compile it breaks the graph.

    Returns:
        float32 (float64 for float64 logits): [..] for reduction "none", a scalar for "sum" and "mean". Every rank has
        the same bits. Rows whose target is neither a class nor `ignore_index` are NaN. Where logits differ by more than
        float32 can hold, the loss is inf. Differentiable once.

    Raises:
        TypeError, ValueError: an argument is wrong; names it, what was expected and what it was; before any collective.
        IndexError: with check_targets, on every rank, where any rank has a bad target; names rank, row (counted over
            all leading dimensions) and value.

    Collectives: one all-gather of 12 bytes a row (20 with smoothing) in forward, none in backward; one more of 24 bytes
    first with check_targets.
    """
    if torch.compiler.is_compiling():
        if inplace is not True:
            return loss_in_graph(logits, target, group, options, shard, inplace, loss_options)
        return _eager_loss_outside_the_graph(logits, target, group, options, shard, inplace, loss_options)
    return _eager_loss(logits, target, group, options, shard, inplace, loss_options)


def _eager_loss(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None,
    options: LossOptions | None,
    shard: VocabShard | None,
    inplace: Inplace,
    loss_options: dict[str, Any],
) -> Tensor:
    resolved = resolve_options(options, loss_options)
    logits, target, call = resolve_call(logits, target, group, resolved, shard, inplace)
    check_targets(target, call)
    loss: Tensor = VocabParallelCrossEntropy.apply(logits, target, call)
    return reduce_loss(loss, target, resolved.reduction, resolved.ignore_index)


# Reference counts and raw writes into the logits' storage are not for a compiler to trace.
_eager_loss_outside_the_graph = torch._disable_dynamo(_eager_loss)  # type: ignore[attr-defined]
