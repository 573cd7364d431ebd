"""The public loss on logits: checks what it was given, then hands over to the autograd node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce import environment
from te_ce.autograd import Inplace, LossCall, VocabParallelCrossEntropy
from te_ce.backend import choose_backend
from te_ce.checks import check_inplace, check_inputs, raise_for_bad_targets
from te_ce.groups import check_group
from te_ce.layout import readable, readable_in_place
from te_ce.options import LossOptions, resolve_options
from te_ce.problem import ShardProblem
from te_ce.shard import VocabShard, resolve_shard


# Reference counts and raw writes into the logits' storage are not for a compiler to trace.
@torch._disable_dynamo  # type: ignore[attr-defined]
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
            is decided in backward; a CUDA stream that still reads logits nobody holds any more cannot be seen. False:
            never. True: always; a later use of the logits by autograd, or a second backward, raises.

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
    resolved = resolve_options(options, loss_options)
    check_inputs(logits, target)
    check_group(group)
    problem = ShardProblem.resolve(resolved, resolve_shard(shard, logits.shape[-1], group))
    check_inplace(inplace, logits)
    backend = choose_backend(logits)
    if resolved.check_targets or environment.check_targets_requested():
        raise_for_bad_targets(target, problem, group)
    if not readable_in_place(logits):
        logits = logits.resolve_neg().contiguous()
    target = readable(target)
    loss: Tensor = VocabParallelCrossEntropy.apply(logits, target, LossCall(problem, group, backend, inplace))
    return _reduce(loss, target, resolved)


def _reduce(loss: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    if options.reduction == "none":
        return loss
    if options.reduction == "sum":
        return loss.sum()
    # In 64 bits: an int32 target compared with a larger ignore_index would wrap.
    return loss.sum() / (target.long() != options.ignore_index).sum().clamp(min=1)
