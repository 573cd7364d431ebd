"""One call of the loss, checked and resolved: before anything runs, the same for eager calls and for the operators."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce import environment
from te_ce.autograd import Inplace, LossCall
from te_ce.backend import choose_backend
from te_ce.checks import check_inplace, check_inputs, raise_for_bad_targets
from te_ce.groups import check_group, group_size
from te_ce.layout import readable, readable_in_place
from te_ce.options import LossOptions
from te_ce.problem import ShardProblem
from te_ce.shard import VocabShard, resolve_shard


def resolve_call(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None,
    options: LossOptions,
    shard: VocabShard | None,
    inplace: Inplace,
) -> tuple[Tensor, Tensor, LossCall]:
    """Logits and target as the backends read them, and what else the call needs.

    Raises:
        TypeError, ValueError: an argument is wrong; before any collective.
        IndexError: with check_targets, on every rank, where any rank has a bad target.
    """
    check_inputs(logits, target)
    check_group(group)
    ranks = group_size(group)
    problem = ShardProblem.resolve(options, resolve_shard(shard, logits.shape[-1], group), ranks)
    check_inplace(inplace, logits)
    backend = choose_backend(logits)
    if options.check_targets or environment.check_targets_requested():
        raise_for_bad_targets(target, problem, group)
    if not readable_in_place(logits):
        logits = logits.resolve_neg().contiguous()
    return logits, readable(target), LossCall(problem, group if ranks > 1 else None, backend, inplace)
