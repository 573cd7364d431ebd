"""The gradient of a shard's logits, recomputed from the statistics of the whole rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_ce.outputs import OutputGrads
from te_ce.problem import ShardProblem
from te_ce.reference.rows import (
    Scale,
    is_class,
    local_target,
    real_columns,
    slices,
    split_scale,
    times_size,
    transform,
)


class _Coefficients(NamedTuple):
    """Of dz_i = p_i (A - E (z_i - lse)) - C - B [i = y], [rows] each."""

    a: Tensor
    b: Tensor
    c: Tensor | None
    e: Tensor | None


def logits_gradient(
    logits: Tensor,
    target: Tensor,
    grads: OutputGrads,
    saved: Tensor,
    out: Tensor,
    problem: ShardProblem,
    row_scale: Tensor | None = None,
) -> None:
    """Write the gradient of this shard's logits, rounded once.

    dx_i = dz_i scale (1 - tanh^2(x_i / cap)), dz_i = p_i (A - E (z_i - lse)) - C - B [i = y],
    p_i = exp(z_i - max z) / d, A = g (1 + 2 w lse) + g_lse - g_lp - g_H H, B = g (1 - a') - g_lp, C = g a'/V, E = g_H

    Args:
        logits: [.., V_local], as in the forward pass.
        target: [..], int64 or int32, global ids.
        grads: gradients g, g_lp, g_H, g_lse [..] of loss, log-probs, entropy and lse of each row, any strides.
        saved: [saved_fields, N], as `merge_statistics` gave it.
        out: [.., V_local], dtype of the logits; may be the logits themselves.
        row_scale: [..] float32, as in the forward pass.
    """
    target = target.reshape(-1).long()
    given = OutputGrads(*(None if grad is None else grad.reshape(-1) for grad in grads))
    row_scale = None if row_scale is None else row_scale.reshape(-1)
    for rows, index in slices(logits):
        y, of_rows = target[rows], saved[:, rows]
        upstream = OutputGrads(*(None if grad is None else grad[rows] for grad in given))
        of_row = None if row_scale is None else row_scale[rows]
        scale = split_scale(problem, of_row, logits.device)
        u, tanh = transform(real_columns(logits[index], problem), problem, scale)
        grad = _shard_gradient(u, y, upstream, of_rows, problem, scale)
        if tanh is not None:
            grad *= tanh.square_().neg_().add_(1.0)
        if of_row is not None:
            grad *= of_row[:, None]
        elif problem.scale != 1.0:
            grad *= problem.scale
        grad[~is_class(y, problem)] = torch.nan
        grad[y == problem.ignore_index] = 0.0
        part = out[index]
        part[..., : problem.real_columns] = grad.view(*part.shape[:-1], problem.real_columns)
        part[..., problem.real_columns :] = 0.0


def _shard_gradient(
    u: Tensor, y: Tensor, grads: OutputGrads, saved: Tensor, problem: ShardProblem, scale: Scale | None
) -> Tensor:
    """dz [rows, K]; `u` is lost."""
    m, d = saved[0], saved[1]
    of = _coefficients(grads, saved, problem, scale)
    from_max = u.sub_(m[:, None])
    if scale is not None:
        from_max.mul_(scale.size[:, None])
    if of.e is None:
        grad = from_max.exp_().mul_((of.a / d)[:, None])
    else:
        exp = from_max.exp()
        # A probability of 0 weighs an infinite logarithm; the d of a row without a softmax stays, and makes it NaN.
        log_p = torch.where(exp == 0.0, 0.0, from_max - d.log()[:, None])
        grad = exp * ((of.a[:, None] - of.e[:, None] * log_p) / d[:, None])
    if of.c is not None:
        grad -= of.c[:, None]
    if problem.real_columns:
        owned, column = local_target(y, problem)
        # -0.0 changes nothing that it is added to; 0.0 would turn a -0.0 of another shard's row around.
        grad.scatter_add_(1, column[:, None], torch.where(owned, -of.b, -0.0)[:, None])
    return grad


def _coefficients(grads: OutputGrads, saved: Tensor, problem: ShardProblem, scale: Scale | None) -> _Coefficients:
    m, d = times_size(saved[0], scale), saved[1]
    a = b = torch.zeros_like(m)
    c = None
    if grads.loss is not None:
        g = grads.loss
        a, b = g, g * problem.target_weight
        if problem.z_loss_weight:
            a = g * (1.0 + 2.0 * problem.z_loss_weight * (m + d.log()))
        if problem.is_smoothed:
            c = g * problem.class_weight
    if grads.lse is not None:
        a = a + grads.lse
    if grads.log_probs is not None:
        a, b = a - grads.log_probs, b - grads.log_probs
    if grads.entropy is not None:
        a = a - grads.entropy * (d.log() - saved[2] / d)
    return _Coefficients(a, b, c, grads.entropy)
