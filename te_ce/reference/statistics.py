"""Statistics of every row over the columns of one shard."""

from __future__ import annotations

import torch
from torch import Tensor

from te_ce.problem import ShardProblem
from te_ce.reference.rows import Scale, local_target, real_columns, slices, split_scale, statistics_dtype, transform

# The argmax is an integer among the statistics, of as many bits.
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def row_statistics(logits: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None) -> Tensor:
    """Statistics of every row over this shard's real columns, of u: z = scale cap tanh(x / cap) is |scale| u.

    Args:
        logits: [.., V_local], x, any float dtype, any strides; read once.
        target: [..], int64 or int32, global ids.
        row_scale: [..] float32, the scale of each row; None: `problem.scale`.

    Returns:
        [parts, fields, N], see `ShardProblem.fields`; one part, or one per block of `reproducible_tp`. u_y is -inf
        where the target is elsewhere. A part without columns gives the identity: -inf, 0, -inf, 0, 0, 0, and the
        largest integer. The kernels give `problem.parts` parts, and leave undefined what they give for ignored rows,
        but for max and argmax where predictions are asked for.
    """
    target = target.reshape(-1).long()
    row_scale = None if row_scale is None else row_scale.reshape(-1)
    parts = problem.parts if problem.block else 1
    stats = logits.new_empty((parts, problem.fields, target.numel()), dtype=statistics_dtype(logits))
    for rows, index in slices(logits):
        scale = split_scale(problem, None if row_scale is None else row_scale[rows], logits.device)
        u, _ = transform(real_columns(logits[index], problem), problem, scale)
        u_y = _target_logit(u, target[rows], problem)
        if not problem.block:
            _span_statistics(u, 0, u_y, stats[0, :, rows], problem, scale)
            continue
        for part in range(parts):
            # A copy: how torch sums a row may depend on its strides.
            first = part * problem.block
            span = u[:, first : first + problem.block].clone()
            _span_statistics(span, first, u_y, stats[part, :, rows], problem, scale)
            u_y = torch.full_like(u_y, -torch.inf)
    return stats


def _span_statistics(
    u: Tensor, first: int, u_y: Tensor, out: Tensor, problem: ShardProblem, scale: Scale | None
) -> None:
    """Statistics of the columns [first, first + K) of a shard into `out` [fields, rows]; `u` [rows, K] is lost."""
    columns = u.shape[1]
    m = u.amax(-1) if columns else u.new_full(u.shape[:1], -torch.inf)
    fields = [m, u.new_empty(0), u_y]
    if problem.has_predictions:
        argmax = (problem.start + first + u.argmax(-1)) if columns else torch.full_like(m, 0).long() + _LAST[u.dtype]
    from_max = u.sub_(_finite_or_zero(m)[:, None])
    if problem.is_smoothed:
        fields += [_row_sum(from_max), torch.full_like(m, columns)]
    if scale is not None:
        exp = _exp_of_product(from_max, scale.size[:, None])
    else:
        exp = from_max.exp() if problem.has_entropy else from_max.exp_()
    fields[1] = _row_sum(exp)
    if problem.has_entropy:
        # exp(-inf) weighs -inf by 0, which would be NaN.
        fields.append(_row_sum(torch.where(exp == 0.0, 0.0, from_max * exp)))
    if problem.has_predictions:
        fields.append(argmax.to(INTEGERS[u.dtype]).view(u.dtype))
    for number, field in enumerate(fields):
        out[number] = field


_LAST = {dtype: torch.iinfo(integer).max for dtype, integer in INTEGERS.items()}


def _target_logit(u: Tensor, target: Tensor, problem: ShardProblem) -> Tensor:
    if not problem.real_columns:
        return u.new_full(u.shape[:1], -torch.inf)
    owned, column = local_target(target, problem)
    return torch.where(owned, u.gather(1, column[:, None])[:, 0], -torch.inf)


def _finite_or_zero(m: Tensor) -> Tensor:
    """A max to subtract: -inf - -inf would make NaN of a shard that has nothing to add."""
    return torch.where(m == -torch.inf, 0.0, m)


def _exp_of_product(x: Tensor, factor: Tensor) -> Tensor:
    """exp(factor x); what the product loses by rounding, for equal terms to one side, is put back to first order."""
    product = x * factor
    rounded = product.to(x.dtype)
    exp = rounded.exp()
    return exp.addcmul_(exp, product.sub_(rounded).nan_to_num_(0.0, 0.0, 0.0).to(x.dtype))


def _row_sum(x: Tensor) -> Tensor:
    """Sum over the columns, in double, with the same bits for a row alone and in a batch.

    In float32, small equal terms beside the 1 of the max round to one side. torch splits the sum of a single row over
    its threads, that of several rows it does not.
    """
    total = x.repeat(2, 1).sum(-1, dtype=torch.float64)[:1] if x.shape[0] == 1 else x.sum(-1, dtype=torch.float64)
    return total.to(x.dtype)
