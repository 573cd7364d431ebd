"""Losses that lose one option, or one term of an output, somewhere: what the tests of the whole loss must refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from te_ce.backend import Backend
from te_ce.outputs import OutputGrads
from te_ce.problem import ShardProblem
from tests.support.broken import GradientStep, MergedRows, _with, with_gradient
from tests.support.whole import WholeCase


def _gradient(change: Callable[[GradientStep], GradientStep]) -> Callable[[Backend], Backend]:
    """The backend with other arguments for its gradient."""
    return lambda backend: with_gradient(backend, lambda step: backend.logits_gradient(*change(step)))


def _statistics(**fields: object) -> Callable[[Backend], Backend]:
    """The backend with other fields of the problem while the logits are read; None as row_scale drops that too."""

    def broken(backend: Backend) -> Backend:
        def row_statistics(
            logits: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
        ) -> Tensor:
            row_scale = None if "scale" in fields else row_scale
            return backend.row_statistics(logits, target, dataclasses.replace(problem, **fields), row_scale)

        return _with(backend, row_statistics=row_statistics)

    return broken


def _merge(
    change: Callable[[Tensor, ShardProblem], tuple[Tensor, ShardProblem]],
) -> Callable[[Backend], Backend]:
    """The backend with other statistics, or another problem, when they are merged."""

    def broken(backend: Backend) -> Backend:
        def merge_statistics(
            gathered: Tensor, target: Tensor, problem: ShardProblem, row_scale: Tensor | None = None
        ) -> MergedRows:
            changed, problem = change(gathered.clone(), problem)
            return backend.merge_statistics(changed, target, problem, row_scale)

        return _with(backend, merge_statistics=merge_statistics)

    return broken


def _without(name: str, value: object) -> Callable[[GradientStep], GradientStep]:
    """The gradient's problem with this field at a value that has no effect."""
    return lambda step: step._replace(problem=dataclasses.replace(step.problem, **{name: value}))


def _scale_dropped(step: GradientStep) -> GradientStep:
    """p is right, only the chain rule's factor is missing: the statistics are of the scaled logits."""
    scale = step.problem.scale if step.row_scale is None else step.row_scale
    return step._replace(grads=OutputGrads(*(None if g is None else g / scale for g in step.grads)))


def _softcap_slope_dropped(step: GradientStep) -> GradientStep:
    """The logits are capped already, as far as the gradient knows."""
    cap = step.problem.softcap
    if cap is None:
        return step
    # In the dtype of the logits, which that of the gradient is.
    capped = ((step.logits.float() / cap).tanh() * cap).to(step.logits.dtype)
    return step._replace(logits=capped, problem=dataclasses.replace(step.problem, softcap=None))


def _given(grad: Tensor | None) -> Tensor:
    """Not an assertion, which would pass for a refusal."""
    if grad is None:
        raise ValueError("this broken loss needs every gradient")
    return grad


def _entropy_of(step: GradientStep) -> Tensor:
    _, d, t = step.saved
    return (d.log() - t / d).view(_given(step.grads.loss).shape)


def _entropy_terms_dropped(*, mean: bool, own: bool) -> Callable[[GradientStep], GradientStep]:
    """A loses g_H H, or E is 0: said by what is added to the gradient of lse, which adds to A alone."""

    def change(step: GradientStep) -> GradientStep:
        grads = step.grads
        shift = _given(grads.entropy) * _entropy_of(step)
        if mean:
            grads = grads._replace(lse=_given(grads.lse) + shift)
        if own:
            grads = grads._replace(lse=_given(grads.lse) - shift, entropy=None)
        return step._replace(grads=grads)

    return change


def _upstream_dropped(name: str) -> Callable[[GradientStep], GradientStep]:
    return lambda step: step._replace(grads=step.grads._replace(**{name: None}))


def _log_probs_without_target(step: GradientStep) -> GradientStep:
    """The gradient of the log-probability reaches the softmax, but not the target's column."""
    grads = step.grads
    return step._replace(grads=grads._replace(lse=_given(grads.lse) - _given(grads.log_probs), log_probs=None))


def _field(problem: ShardProblem, name: str) -> int:
    """Where t or the argmax is among the statistics."""
    first = 3 + 2 * problem.is_smoothed
    return first if name == "t" else first + problem.has_entropy


def _t_not_moved(gathered: Tensor, problem: ShardProblem) -> tuple[Tensor, ShardProblem]:
    """Merged as if every shard's t were relative to the max of the row."""
    m, d = gathered[:, 0], gathered[:, 1]
    moved = (m - m.amax(0)) * d
    gathered[:, _field(problem, "t")] -= torch.where(d > 0, moved, 0.0)
    return gathered, problem


def _local_argmax(gathered: Tensor, problem: ShardProblem) -> tuple[Tensor, ShardProblem]:
    """Predictions counted from the first column of the shard that they are in (here: of this one)."""
    argmax = gathered[:, _field(problem, "argmax")].view(torch.int32)
    argmax -= problem.start
    return gathered, problem


def _merged_without(name: str, value: object) -> Callable[[Tensor, ShardProblem], tuple[Tensor, ShardProblem]]:
    return lambda gathered, problem: (gathered, dataclasses.replace(problem, **{name: value}))


def _every(case: WholeCase) -> bool:
    return True


def _several_columns(case: WholeCase) -> bool:
    return case.columns > 6


# Name -> (broken backend, cases that show it, fewest shards that show it).
BROKEN_WHOLE: dict[str, tuple[Callable[[Backend], Backend], Callable[[WholeCase], bool], int]] = {
    "scale_dropped_in_statistics": (_statistics(scale=1.0), lambda c: c.has_row_scale or c.options.scale != 1.0, 1),
    "scale_dropped_in_gradient": (_gradient(_scale_dropped), lambda c: c.has_row_scale or c.options.scale != 1.0, 1),
    "softcap_dropped_in_statistics": (_statistics(softcap=None), lambda c: c.options.softcap is not None, 1),
    "softcap_dropped_in_gradient": (_gradient(_without("softcap", None)), lambda c: c.options.softcap is not None, 1),
    "softcap_slope_dropped": (_gradient(_softcap_slope_dropped), lambda c: c.options.softcap is not None, 1),
    "z_loss_dropped_in_loss": (_merge(_merged_without("z_loss_weight", 0.0)), lambda c: c.options.z_loss_weight > 0, 1),
    "z_loss_dropped_in_gradient": (
        _gradient(_without("z_loss_weight", 0.0)),
        lambda c: c.options.z_loss_weight > 0,
        1,
    ),
    "smoothing_dropped_in_gradient": (
        _gradient(_without("smoothing_weight", 0.0)),
        lambda c: c.options.label_smoothing > 0,
        1,
    ),
    "loss_gradient_dropped": (_gradient(_upstream_dropped("loss")), _every, 1),
    "log_probs_gradient_dropped": (_gradient(_upstream_dropped("log_probs")), _every, 1),
    "entropy_gradient_dropped": (_gradient(_upstream_dropped("entropy")), _every, 1),
    "lse_gradient_dropped": (_gradient(_upstream_dropped("lse")), _every, 1),
    "entropy_mean_term_dropped": (_gradient(_entropy_terms_dropped(mean=True, own=False)), _every, 1),
    "entropy_own_term_dropped": (_gradient(_entropy_terms_dropped(mean=False, own=True)), _every, 1),
    "log_probs_without_target": (_gradient(_log_probs_without_target), _every, 1),
    "entropy_not_moved_to_the_max": (_merge(_t_not_moved), _several_columns, 2),
    "predictions_within_the_shard": (_merge(_local_argmax), _several_columns, 2),
}


def z_rounded_first(backend: Backend) -> Backend:
    """z = scale x is rounded to float32 before its max is subtracted, as in a loss on `logits * scale`; no softcap."""

    def scaled(x: Tensor, problem: ShardProblem, row_scale: Tensor | None) -> Tensor:
        return x.float() * (problem.scale if row_scale is None else row_scale[..., None])

    def plain(problem: ShardProblem) -> ShardProblem:
        return dataclasses.replace(problem, scale=1.0)

    def gradient(step: GradientStep) -> None:
        scale = step.problem.scale if step.row_scale is None else step.row_scale
        z = scaled(step.logits, step.problem, step.row_scale)
        grads = OutputGrads(*(None if g is None else g * scale for g in step.grads))
        out = torch.empty_like(z)
        backend.logits_gradient(z, step.target, grads, step.saved, out, plain(step.problem))
        step.out.copy_(out)

    return with_gradient(
        backend,
        gradient,
        row_statistics=lambda logits, target, problem, row_scale=None: backend.row_statistics(
            scaled(logits, problem, row_scale), target, plain(problem)
        ),
        merge_statistics=lambda gathered, target, problem, row_scale=None: backend.merge_statistics(
            gathered, target, plain(problem)
        ),
    )
