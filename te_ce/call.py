"""One call of the loss, checked and resolved: before anything runs, the same for eager calls and for the operators.

All of that depends on the layout of the tensors and on the other arguments, which are the same at every step of a
training run: what a call resolved to is kept.
"""

from __future__ import annotations

from typing import Any

import torch
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

_KEPT = 64
_resolved: dict[Any, LossCall] = {}


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
    """
    # Every time: a group may have been destroyed since.
    check_group(group)
    key = _key(logits, target, group, options, shard, inplace)
    try:
        call = _resolved.get(key)
    except TypeError:  # not hashable: some argument is no such thing at all
        key = call = None
    if call is None:
        call = _check(logits, target, group, options, shard, inplace)
        if key:
            if len(_resolved) >= _KEPT:
                _resolved.clear()
            _resolved[key] = call
    if not call.reads_in_place:
        logits = logits.resolve_neg().contiguous()
    return logits, readable(target), call


def check_targets(target: Tensor, call: LossCall) -> None:
    """Raise an IndexError on every rank where any rank has a bad target, if the options or the environment ask for it.

    One all-gather and a host synchronisation then.
    """
    if call.checks_targets:
        raise_for_bad_targets(target, call.problem, call.group)


def _check(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None,
    options: LossOptions,
    shard: VocabShard | None,
    inplace: Inplace,
) -> LossCall:
    """See `resolve_call`; what it gives depends on nothing but `_key`."""
    check_inputs(logits, target)
    ranks = group_size(group)
    problem = ShardProblem.resolve(options, resolve_shard(shard, logits.shape[-1], group), ranks)
    check_inplace(inplace, logits)
    return LossCall(
        problem=problem,
        group=group if ranks > 1 else None,
        backend=choose_backend(logits),
        inplace=inplace,
        reads_in_place=readable_in_place(logits),
        checks_targets=options.check_targets or environment.check_targets_requested(),
    )


def _key(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None,
    options: LossOptions,
    shard: VocabShard | None,
    inplace: Inplace,
) -> tuple[Any, ...] | None:
    """Everything that `_check` looks at; None for tensors out of the ordinary."""
    if type(logits) is not Tensor or type(target) is not Tensor:
        return None
    if logits.layout is not torch.strided or target.layout is not torch.strided:
        return None
    if logits.is_nested or target.is_nested or logits.is_neg():
        return None
    of_logits = (logits.shape, logits.stride(), logits.dtype, logits.device)
    of_target = (target.shape, target.stride(), target.dtype, target.device)
    # True == 1, which is not a value of `inplace`.
    return (*of_logits, *of_target, group, options, shard, inplace, type(inplace), *environment.settings())
