"""One call of the linear loss, checked and resolved before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_ce import environment
from te_ce.backend import Backend, choose_backend
from te_ce.checks import check_row_scale
from te_ce.groups import group_size
from te_ce.linear.checks import check_linear_inputs, check_token_weights, check_width
from te_ce.linear.chunks import Keep, check_keep, kept_chunks, token_chunks, vocabulary_chunks
from te_ce.linear.weight_gradient import WeightGradient
from te_ce.options import LossOptions
from te_ce.problem import ShardProblem
from te_ce.record import Record, describe_call
from te_ce.shard import VocabShard, resolve_shard


class LinearTensors(NamedTuple):
    """What a caller passes: hidden [.., H], weight [V_local, H], bias [V_local], and the rest [..]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    row_scale: Tensor | None
    token_weights: Tensor | None


class LinearRequest(NamedTuple):
    """What a caller asks for, besides the tensors."""

    group: ProcessGroup | None  # as `resolve_group` gives it
    options: LossOptions
    shard: VocabShard | None
    outputs: tuple[str, ...]
    sequence_parallel: bool
    keep: Keep
    weight_gradient: Callable[[], WeightGradient] | None = None  # None: a new tensor


class LinearCall(NamedTuple):
    """What one call needs besides its tensors."""

    problem: ShardProblem
    group: ProcessGroup | None  # None: of one rank
    backend: Backend
    sequence_parallel: bool
    chunks: tuple[slice, ...]  # of this rank's real columns
    kept: int  # how many of them, the last ones, are kept for backward
    token_chunks: tuple[slice, ...]  # the same on every rank
    reduction: str
    record: Record | None  # what a checked call exchanges first, but for the targets; None: not checked
    weight_gradient: Callable[[], WeightGradient] | None


def autocast_to_one_dtype(tensors: LinearTensors) -> LinearTensors:
    """Hidden, weight and bias as `torch.nn.functional.linear` would read them under the autocast that is on, if any."""
    hidden = tensors.hidden
    if not isinstance(hidden, Tensor):
        return tensors
    device = hidden.device.type
    # The meta device, for example, has none to ask about.
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        is_cast = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if is_cast else tensor

    bias = None if tensors.bias is None else cast(tensors.bias)
    return tensors._replace(hidden=cast(hidden), weight=cast(tensors.weight), bias=bias)


def resolve_linear_call(tensors: LinearTensors, request: LinearRequest) -> LinearCall:
    """The call that these tensors and this request describe.

    Raises:
        TypeError, ValueError: an argument is wrong; before any collective.
    """
    hidden, weight, bias, target, row_scale, token_weights = tensors
    group, options, shard, outputs, sequence_parallel, keep, weight_gradient = request
    if not isinstance(sequence_parallel, bool):
        raise TypeError(f"sequence_parallel: expected a bool, got {type(sequence_parallel).__name__}")
    if options.reproducible_tp:
        raise ValueError(
            "reproducible_tp: expected False for the linear loss, whose GEMMs may choose by shape, got True; use "
            "vocab_parallel_cross_entropy on logits"
        )
    check_keep(keep)
    ranks = group_size(group)
    check_linear_inputs(hidden, weight, bias, target, ranks if sequence_parallel else 1)
    check_row_scale(row_scale, target)
    if token_weights is not None:
        check_token_weights(token_weights, target, options.reduction)
        if keep != "recompute":
            warnings.warn("keep: has no effect with token_weights, where no logits are kept", stacklevel=5)
    check_width(weight, shard)
    columns = resolve_shard(shard, weight.shape[0], group)
    problem = ShardProblem.resolve(options, columns, ranks, outputs, equal_shards=shard is None)
    n_tokens, itemsize = target.numel(), hidden.element_size()
    chunks = vocabulary_chunks(n_tokens, hidden.shape[-1], problem.real_columns, itemsize, keep)
    is_checked = options.check_targets or environment.check_targets_requested()
    return LinearCall(
        problem=problem,
        group=group if ranks > 1 else None,
        backend=choose_backend(hidden),
        sequence_parallel=sequence_parallel,
        chunks=chunks,
        kept=kept_chunks(keep, chunks, n_tokens, itemsize),
        # By the columns of a rank of equal ones.
        token_chunks=token_chunks(n_tokens, -(-columns.size // ranks), itemsize),
        reduction=options.reduction,
        record=_record(tensors, request, columns) if is_checked else None,
        weight_gradient=weight_gradient,
    )


def _record(tensors: LinearTensors, request: LinearRequest, columns: VocabShard) -> Record:
    hidden = tensors.hidden
    facts = {
        "hidden.shape": tuple(hidden.shape),
        # What decides whether backward has a collective.
        "hidden.requires_grad": hidden.requires_grad and torch.is_grad_enabled(),
        "sequence_parallel": request.sequence_parallel,
        "token_weights": "given" if tensors.token_weights is not None else "none",
        "chunk_tokens": environment.chunk_tokens(),
    }
    declared = request.shard is not None
    return describe_call(
        hidden, tensors.target, tensors.row_scale, request.options, columns, declared, request.outputs, facts
    )
