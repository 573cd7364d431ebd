"""One call of the loss, checked and resolved: before anything runs, the same for eager calls and for the operators.

All of that depends on the layout of the tensors and on the other arguments, which are the same at every step of a
training run: what a call resolved to is kept. But not its group, whose connections and threads would outlive
`destroy_process_group`.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce import environment
from te_ce.agreement import raise_for_faults
from te_ce.autograd import Inplace, LossCall
from te_ce.backend import choose_backend
from te_ce.checks import check_inplace, check_inputs, check_row_scale
from te_ce.groups import group_size
from te_ce.layout import readable, readable_in_place
from te_ce.options import LossOptions
from te_ce.problem import ShardProblem
from te_ce.record import describe_call
from te_ce.shard import VocabShard, resolve_shard

_KEPT = 64
_resolved: dict[Any, LossCall] = {}


class Request(NamedTuple):
    """What a caller asks for, besides the tensors."""

    group: ProcessGroup | None  # as `resolve_group` gives it, at every call
    options: LossOptions
    shard: VocabShard | None
    inplace: Inplace
    outputs: tuple[str, ...] = ()


def resolve_call(
    logits: Tensor, target: Tensor, row_scale: Tensor | None, request: Request
) -> tuple[Tensor, Tensor, Tensor | None, LossCall]:
    """Logits, target and scale of the rows as the backends read them, and what else the call needs.

    Raises:
        TypeError, ValueError: an argument is wrong; before any collective.
    """
    key = _key(logits, target, row_scale, request)
    try:
        call = _resolved.get(key)
    except TypeError:  # not hashable: some argument is no such thing at all
        key = call = None
    if call is None:
        call = _check(logits, target, row_scale, request)
        if key:
            if len(_resolved) >= _KEPT:
                _resolved.clear()
            _resolved[key] = call._replace(group=None)
    elif group_size(request.group) > 1:
        call = call._replace(group=request.group)
    if not call.reads_in_place:
        logits = logits.resolve_neg().contiguous()
    if row_scale is not None:
        row_scale = readable(row_scale)
    return logits, readable(target), row_scale, call


def check_targets(target: Tensor, row_scale: Tensor | None, call: LossCall) -> None:
    """Raise on every rank where any rank has a bad target or disagrees, if the options or the environment ask for it.

    One all-gather and a host synchronisation then.
    """
    if call.record is not None:
        raise_for_faults(target, row_scale, call.record, call.problem, call.group)


def _check(logits: Tensor, target: Tensor, row_scale: Tensor | None, request: Request) -> LossCall:
    """See `resolve_call`; what it gives depends on nothing but `_key`."""
    group, options, shard, inplace, outputs = request
    check_inputs(logits, target)
    check_row_scale(row_scale, target)
    ranks = group_size(group)
    columns = resolve_shard(shard, logits.shape[-1], group)
    problem = ShardProblem.resolve(options, columns, ranks, outputs, equal_shards=shard is None)
    check_inplace(inplace, logits)
    is_checked = options.check_targets or environment.check_targets_requested()
    return LossCall(
        problem=problem,
        group=group if ranks > 1 else None,
        backend=choose_backend(logits),
        inplace=inplace,
        reads_in_place=readable_in_place(logits),
        record=describe_call(logits, target, row_scale, options, columns, shard is not None, outputs)
        if is_checked
        else None,
    )


def _key(logits: Tensor, target: Tensor, row_scale: Tensor | None, request: Request) -> tuple[Any, ...] | None:
    """Everything that `_check` looks at; None for tensors out of the ordinary."""
    if type(logits) is not Tensor or type(target) is not Tensor:
        return None
    if logits.layout is not torch.strided or target.layout is not torch.strided:
        return None
    if logits.is_nested or target.is_nested or logits.is_neg():
        return None
    of_logits = (logits.shape, logits.stride(), logits.dtype, logits.device)
    of_target = (target.shape, target.stride(), target.dtype, target.device)
    of_scale = None if row_scale is None else (row_scale.shape, row_scale.device)
    group = None if request.group is None else weakref.ref(request.group)
    # True == 1, which is not a value of `inplace`.
    return (*of_logits, *of_target, of_scale, group, *request[1:], type(request.inplace), *environment.settings())
