"""The plain-torch twin of the kernels: the readable definition of the loss, the CPU path, and the tests' subject.

Same functions, same arguments as `te_ce.kernels`. Statistics and loss are float32, or float64 for float64
logits. Rows are taken in slices, so that a float32 copy of all logits never exists.

Every difference is relative to the row's max, never through a rounded lse: three equal logits of 1e8 have loss
log 3, and (m + log d) - z_y in float32 would make it 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from te_ce.layout import row_slices
from te_ce.problem import ShardProblem

# Elements of the float32 working copy. It stays in the cache of one core and is small beside any logits.
_SLICE_ELEMENTS = 1 << 20


def row_statistics(logits: Tensor, target: Tensor, problem: ShardProblem) -> Tensor:
    """Statistics of every row over this shard's real columns.

    Args:
        logits: [.., V_local], any float dtype, any strides; read once.
        target: [..], int64 or int32, global ids.

    Returns:
        [1, fields, N]: m = max z, d = sum exp(z - m), z_y (-inf where the target is elsewhere), and with smoothing
        s = sum (z - m) and the number of columns. A shard without columns gives the identity (-inf, 0, -inf, 0, 0).
        The kernels give [parts, fields, N], and leave undefined what they give for ignored rows.
    """
    target = target.reshape(-1).long()
    stats = logits.new_empty((problem.fields, target.numel()), dtype=_statistics_dtype(logits))
    for rows, index in _slices(logits):
        z = _real_columns(logits[index], problem)
        m = z.amax(-1) if problem.real_columns else z.new_full(z.shape[:1], -torch.inf)
        stats[0, rows] = m
        stats[2, rows] = _target_logit(z, target[rows], problem)
        from_max = z.sub_(_finite_or_zero(m)[:, None])
        if problem.is_smoothed:
            stats[3, rows] = _row_sum(from_max)
            stats[4, rows] = problem.real_columns
        stats[1, rows] = _row_sum(from_max.exp_())
    return stats[None]


def row_loss(logits: Tensor, target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor]:
    """Loss [..] of every row and saved [2, N] = (m, d), where one rank holds the whole vocabulary."""
    return merge_statistics(row_statistics(logits, target, problem), target, problem)


def merge_statistics(gathered: Tensor, target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor]:
    """Merge the statistics of all parts of all shards, in their order, into the loss of every row.

    L = (1 - a') (log d - (z_y - m)) + a' (log d - s/V). Ignored rows give 0, targets that are no class NaN.

    Args:
        gathered: [parts, fields, N], those of rank 0 first.
        target: [..], int64 or int32, global ids.

    Returns:
        loss [..] and saved [2, N] = (m, d), what the gradient needs.
    """
    shape, target = target.shape, target.reshape(-1).long()
    parts, part_max = range(gathered.shape[0]), gathered[:, 0]
    m = part_max.amax(0)
    weight = torch.exp(part_max - m)
    d = sum((weight[part] * gathered[part, 1] for part in parts), torch.zeros_like(m))
    log_d = d.log()
    from_max = gathered[:, 2].amax(0) - m
    loss = log_d - from_max
    if problem.is_smoothed:
        s = torch.zeros_like(m)
        for part in parts:
            columns = gathered[part, 4]
            # 0 columns times an infinite shift is NaN: an empty shard adds nothing.
            s = s + gathered[part, 3] + torch.where(columns > 0, columns * (part_max[part] - m), 0.0)
        loss = problem.target_weight * loss + problem.smoothing_weight * (log_d - s / problem.classes)
        # Weights of both signs, or 0, would make NaN of a target that costs infinity.
        loss = torch.where((from_max == -torch.inf) & (d > 0), torch.inf, loss)
    loss = torch.where(_is_class(target, problem), loss, torch.nan)
    loss = torch.where(target == problem.ignore_index, 0.0, loss)
    # Not a view: the caller may change its losses in place.
    return loss.new_empty(shape).copy_(loss.view(shape)), torch.stack((m, d))


def logits_gradient(
    logits: Tensor, target: Tensor, grad_loss: Tensor, saved: Tensor, out: Tensor, problem: ShardProblem
) -> None:
    """Write the gradient of this shard's logits: g (p - a'/V - (1 - a') [column is the target]), rounded once.

    Args:
        logits: [.., V_local], as in the forward pass.
        target: [..], int64 or int32, global ids.
        grad_loss: [..], gradient g of the loss of each row, any strides.
        saved: [2, N], m and d of each row over the whole vocabulary.
        out: [.., V_local], dtype of the logits; may be the logits themselves.
    """
    target, grad_loss = target.reshape(-1).long(), grad_loss.reshape(-1)
    for rows, index in _slices(logits):
        y, g, (m, d) = target[rows], grad_loss[rows], saved[:, rows]
        grad = _real_columns(logits[index], problem).sub_(m[:, None]).exp_().mul_((g / d)[:, None])
        if problem.is_smoothed:
            grad -= (g * problem.class_weight)[:, None]
        if problem.real_columns:
            owned, column = _local_target(y, problem)
            grad.scatter_add_(1, column[:, None], torch.where(owned, -g * problem.target_weight, 0.0)[:, None])
        grad[~_is_class(y, problem)] = torch.nan
        grad[y == problem.ignore_index] = 0.0
        part = out[index]
        part[..., : problem.real_columns] = grad.view(*part.shape[:-1], problem.real_columns)
        part[..., problem.real_columns :] = 0.0


def _slices(logits: Tensor) -> Iterator[tuple[slice, tuple[int | slice, ...]]]:
    return row_slices(logits.shape[:-1], max(1, _SLICE_ELEMENTS // max(1, logits.shape[-1])))


def _statistics_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _real_columns(logits: Tensor, problem: ShardProblem) -> Tensor:
    """The real columns as a fresh [rows, K] copy in the dtype of the statistics."""
    real = logits[..., : problem.real_columns]
    return real.to(_statistics_dtype(logits), copy=True).reshape(real.shape[:-1].numel(), problem.real_columns)


def _local_target(target: Tensor, problem: ShardProblem) -> tuple[Tensor, Tensor]:
    """Whether the target is one of this shard's real columns, and that column (0 where it is not)."""
    owned = (target >= problem.start) & (target < problem.start + problem.real_columns)
    return owned, torch.where(owned, target - problem.start, 0)


def _target_logit(z: Tensor, target: Tensor, problem: ShardProblem) -> Tensor:
    if not problem.real_columns:
        return z.new_full(z.shape[:1], -torch.inf)
    owned, column = _local_target(target, problem)
    return torch.where(owned, z.gather(1, column[:, None])[:, 0], -torch.inf)


def _is_class(target: Tensor, problem: ShardProblem) -> Tensor:
    return (target >= 0) & (target < problem.classes)


def _finite_or_zero(m: Tensor) -> Tensor:
    """A max to subtract: -inf - -inf would make NaN of a shard that has nothing to add."""
    return torch.where(m == -torch.inf, 0.0, m)


def _row_sum(x: Tensor) -> Tensor:
    """Sum over the columns, in double, with the same bits for a row alone and in a batch.

    In float32, small equal terms beside the 1 of the max round to one side. torch splits the sum of a single row over
    its threads, that of several rows it does not.
    """
    total = x.repeat(2, 1).sum(-1, dtype=torch.float64)[:1] if x.shape[0] == 1 else x.sum(-1, dtype=torch.float64)
    return total.to(x.dtype)
