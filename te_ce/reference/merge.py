"""Statistics of all parts of all shards to the loss and the other outputs of every row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_ce.problem import ShardProblem
from te_ce.reference.rows import Scale, is_class, split_scale, times_size
from te_ce.reference.statistics import INTEGERS, row_statistics


class _Merged(NamedTuple):
    """Statistics of whole rows, [N] each, as `ShardProblem.fields` names them."""

    m: Tensor
    d: Tensor
    u_y: Tensor
    s: Tensor | None
    t: Tensor | None
    argmax: Tensor | None


def row_loss(
    logits: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """`merge_statistics` of `row_statistics`, where one rank holds the whole vocabulary."""
    return merge_statistics(row_statistics(logits, target, problem, row_scale), target, problem, row_scale)


def merge_statistics(
    gathered: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Merge the statistics of all parts of all shards, in their order, into the loss of every row.

    L = (1 - a') (log d - (z_y - max z)) + a' (log d - s/V) + w (max z + log d)^2, where max z = |scale| m and
    z_y - max z = |scale| (u_y - m). Ignored rows give 0, targets that are no class NaN, also among the outputs; but the
    predictions are those of the logits.

    Args:
        gathered: [parts, fields, N], those of rank 0 first.
        target: [..], int64 or int32, global ids.
        row_scale: [..] float32, that of the statistics; None: `problem.scale`.

    Returns:
        loss [..]; saved [saved_fields, N], what the gradient needs: m, d, and with the entropy t; and `problem.outputs`
        [..] in their order.
    """
    shape, target = target.shape, target.reshape(-1).long()
    scale = split_scale(problem, None if row_scale is None else row_scale.reshape(-1), gathered.device)
    row = _merge(gathered, problem, scale)
    s, t = (None if field is None else times_size(field, scale) for field in (row.s, row.t))
    log_d = row.d.log()
    from_max = times_size(row.u_y - row.m, scale)
    loss = log_d - from_max
    if s is not None:
        loss = problem.target_weight * loss + problem.smoothing_weight * (log_d - s / problem.classes)
        # Weights of both signs, or 0, would make NaN of a target that costs infinity.
        loss = torch.where((from_max == -torch.inf) & (row.d > 0), torch.inf, loss)
    lse = times_size(row.m, scale) + log_d
    z_loss = problem.z_loss_weight * lse * lse
    if problem.z_loss_weight:
        loss = loss + z_loss
    values = {"log_probs": from_max - log_d, "lse": lse, "z_loss": z_loss}
    if t is not None:
        values["entropy"] = log_d - t / row.d

    values = {name: _of_target(value, target, problem) for name, value in {"loss": loss, **values}.items()}
    if row.argmax is not None:
        values["predictions"] = row.argmax
    # Not views: the caller may change its losses in place.
    loss, *outputs = (
        values[name].new_empty(shape).copy_(values[name].view(shape)) for name in ("loss", *problem.outputs)
    )
    saved = [row.m, row.d] if t is None else [row.m, row.d, t]
    return loss, torch.stack(saved), tuple(outputs)


def _of_target(value: Tensor, target: Tensor, problem: ShardProblem) -> Tensor:
    """What is known of rows with this target: NaN where it is no class, 0 where the row is ignored."""
    value = torch.where(is_class(target, problem), value, torch.nan)
    return torch.where(target == problem.ignore_index, 0.0, value)


def combine_statistics(gathered: Tensor, problem: ShardProblem, row_scale: Tensor | None = None) -> Tensor:
    """Merge the statistics of parts of one shard [parts, fields, N] into those of one part, [1, fields, N].

    A shard without a finite logit stays the identity, where a whole row without one has no softmax.

    Args:
        row_scale: [N] float32, that of the statistics; None: `problem.scale`.
    """
    row = _merge(gathered, problem, split_scale(problem, row_scale, gathered.device))
    is_empty = row.m == -torch.inf
    fields = [row.m, torch.where(is_empty, 0.0, row.d), row.u_y]
    if row.s is not None:
        columns = gathered[:, 4].sum(0)
        fields += [torch.where(is_empty, torch.where(columns > 0, -torch.inf, 0.0), row.s), columns]
    if row.t is not None:
        fields.append(torch.where(is_empty, 0.0, row.t))
    if row.argmax is not None:
        fields.append(row.argmax.to(INTEGERS[gathered.dtype]).view(gathered.dtype))
    return torch.stack(fields)[None]


def _merge(gathered: Tensor, problem: ShardProblem, scale: Scale | None) -> _Merged:
    parts, part_max = range(gathered.shape[0]), gathered[:, 0]
    m = part_max.amax(0)
    weight = torch.exp(times_size(part_max - m, scale))
    d = torch.zeros_like(m)
    s = torch.zeros_like(m) if problem.is_smoothed else None
    t = torch.zeros_like(m) if problem.has_entropy else None
    argmax = None
    for part in parts:
        d = d + weight[part] * gathered[part, 1]
        shift = part_max[part] - m
        if s is not None:
            # 0 columns times an infinite shift is NaN: an empty shard adds nothing.
            columns = gathered[part, 4]
            s = s + gathered[part, 3] + torch.where(columns > 0, columns * shift, 0.0)
        if t is not None:
            of_part = gathered[part, 5 if problem.is_smoothed else 3] + shift * gathered[part, 1]
            # A weight of 0 (an infinite shift) times what is infinite is NaN: nothing to add either.
            t = t + torch.where(weight[part] == 0.0, 0.0, weight[part] * of_part)
    if problem.has_predictions:
        ids = gathered[:, -1].contiguous().view(INTEGERS[gathered.dtype]).long()
        # The smallest id among the parts that have the max; with NaN, which equals nothing, that of the first part.
        best = torch.where(part_max == m, ids, torch.iinfo(torch.int64).max).amin(0)
        argmax = torch.where(m.isnan(), ids[0], best)
    return _Merged(m, d, gathered[:, 2].amax(0), s, t, argmax)
