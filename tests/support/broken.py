"""Deliberately broken variants of a backend: what every numeric check must refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_ce.backend import Backend
from te_ce.outputs import OutputGrads
from te_ce.problem import ShardProblem

# Loss, what is saved, other outputs.
MergedRows = tuple[Tensor, Tensor, tuple[Tensor, ...]]


def _with(backend: Backend, **steps: Callable[..., Any]) -> Backend:
    """`backend` with other steps; the loss of one rank is made of the same ones."""
    changed = backend._replace(**steps)

    def row_loss(logits: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None) -> MergedRows:
        stats = changed.row_statistics(logits, target, problem, row_scale)
        return changed.merge_statistics(stats, target, problem, row_scale)

    return changed._replace(row_loss=row_loss)


class GradientStep(NamedTuple):
    """Arguments of `Backend.logits_gradient`, in its order."""

    logits: Tensor
    target: Tensor
    grads: OutputGrads
    saved: Tensor
    out: Tensor
    problem: ShardProblem
    row_scale: Tensor | None = None


def with_gradient(backend: Backend, gradient: Callable[[GradientStep], None], **steps: Callable[..., Any]) -> Backend:
    """`backend` whose gradient is `gradient`, and with other steps."""
    return _with(backend, logits_gradient=lambda *arguments: gradient(GradientStep(*arguments)), **steps)


def off_target_zeroed(backend: Backend) -> Backend:
    """The gradient reaches the target's column only."""

    def gradient(step: GradientStep) -> None:
        backend.logits_gradient(*step)
        column = torch.arange(step.out.shape[-1], device=step.out.device) + step.problem.start
        step.out[column != step.target[..., None]] = 0.0

    return with_gradient(backend, gradient)


def smoothing_over_the_shard(backend: Backend) -> Backend:
    """The smoothed mass is spread over the shard's columns as if they were the vocabulary."""

    def merge_statistics(
        gathered: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
    ) -> MergedRows:
        plain = dataclasses.replace(problem, smoothing_weight=0.0)
        a = problem.smoothing_weight
        if not a or not problem.real_columns:
            return backend.merge_statistics(gathered, target, problem, row_scale)
        loss, saved, outputs = backend.merge_statistics(gathered[:, :3].contiguous(), target, plain, row_scale)
        m, d = saved
        widths = gathered[:, 4, 0]
        rank = int(((widths.cumsum(0) - widths == problem.start) & (widths > 0)).nonzero()[0])
        local_mean = gathered[rank, 3] / gathered[rank, 4] + gathered[rank, 0] - m
        smoothed = (1 - a) * loss + a * (d.log() - local_mean).view(target.shape)
        return torch.where(target == problem.ignore_index, 0.0, smoothed), saved, outputs

    def gradient(step: GradientStep) -> None:
        backend.logits_gradient(*step)
        out, problem, g = step.out, step.problem, step.grads.loss
        assert g is not None
        if problem.real_columns:
            change = problem.smoothing_weight * (1 / problem.classes - 1 / problem.real_columns)
            g = torch.where(step.target == problem.ignore_index, 0.0, g)[..., None]
            out[..., : problem.real_columns] += (g * change).to(out.dtype)

    return with_gradient(backend, gradient, merge_statistics=merge_statistics)


def doubled_reduction(backend: Backend) -> Backend:
    """Every shard's sum is added twice."""

    def merge_statistics(
        gathered: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
    ) -> MergedRows:
        gathered = gathered.clone()
        gathered[:, 1] *= 2
        return backend.merge_statistics(gathered, target, problem, row_scale)

    return _with(backend, merge_statistics=merge_statistics)


def target_shifted(backend: Backend) -> Backend:
    """Targets are off by one, around the end of the vocabulary."""

    def shift(target: Tensor, problem: ShardProblem) -> Tensor:
        shifted = (target + 1) % problem.classes
        return torch.where(target == problem.ignore_index, target, shifted)

    return with_gradient(
        backend,
        lambda step: backend.logits_gradient(*step._replace(target=shift(step.target, step.problem))),
        row_statistics=lambda logits, target, problem, row_scale=None: backend.row_statistics(
            logits, shift(target, problem), problem, row_scale
        ),
        merge_statistics=lambda gathered, target, problem, row_scale=None: backend.merge_statistics(
            gathered, shift(target, problem), problem, row_scale
        ),
    )


def rounded_twice(backend: Backend) -> Backend:
    """The softmax is rounded to the logits' dtype before the target is subtracted and the gradient applied."""

    def gradient(step: GradientStep) -> None:
        out, g = step.out, step.grads.loss
        assert g is not None
        backend.logits_gradient(*step._replace(grads=OutputGrads(torch.ones_like(g))))
        out.copy_(out * g[..., None].to(out.dtype))

    return with_gradient(backend, gradient)


def softmax_rounded_first(backend: Backend) -> Backend:
    """The softmax is stored in the logits' dtype, read back, and only then becomes a gradient."""

    def gradient(step: GradientStep) -> None:
        logits, target, grads, saved, out, problem, _ = step
        assert grads.loss is not None
        m, d = (field.view(target.shape)[..., None] for field in saved)
        p = ((logits.float() - m).exp() / d).to(logits.dtype).float()
        column = torch.arange(logits.shape[-1], device=logits.device) + problem.start
        p -= problem.smoothing_weight / problem.classes
        p -= (1 - problem.smoothing_weight) * (column == target[..., None])
        out.copy_(p * grads.loss[..., None])

    return with_gradient(backend, gradient)


def statistics_in_the_logits_dtype(backend: Backend) -> Backend:
    """The sums are kept in the dtype of the logits."""

    def row_statistics(
        logits: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
    ) -> Tensor:
        stats = backend.row_statistics(logits, target, problem, row_scale)
        return stats.to(logits.dtype).to(stats.dtype)

    return _with(backend, row_statistics=row_statistics)


def through_a_rounded_lse(backend: Backend) -> Backend:
    """The loss is (m + log d) - z_y in float32, instead of log d - (z_y - m)."""

    def merge_statistics(
        gathered: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
    ) -> MergedRows:
        loss, saved, outputs = backend.merge_statistics(gathered, target, problem, row_scale)
        m, d = saved[:2]
        m, log_d = m.view(target.shape), d.log().view(target.shape)
        moved = (m + log_d) - (m + (log_d - loss))
        return torch.where(loss.isfinite(), moved, loss), saved, outputs

    return _with(backend, merge_statistics=merge_statistics)


BROKEN: dict[str, Callable[[Backend], Backend]] = {
    "off_target_zeroed": off_target_zeroed,
    "smoothing_over_the_shard": smoothing_over_the_shard,
    "doubled_reduction": doubled_reduction,
    "target_shifted": target_shifted,
}

# Broken in precision only: refused by the tests that are about precision.
IMPRECISE: dict[str, Callable[[Backend], Backend]] = {
    "rounded_twice": rounded_twice,
    "softmax_rounded_first": softmax_rounded_first,
    "statistics_in_the_logits_dtype": statistics_in_the_logits_dtype,
    "through_a_rounded_lse": through_a_rounded_lse,
}
