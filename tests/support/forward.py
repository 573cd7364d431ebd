"""The forward steps of a backend on shards, and what they should give in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_ce import LossOptions, VocabShard
from te_ce.backend import Backend
from te_ce.problem import ShardProblem

UNIT = 2.0**-24


class Results(NamedTuple):
    """Of all rows, as rank 0 has them: loss, what is saved, and the outputs by name."""

    loss: Tensor
    saved: Tensor
    outputs: dict[str, Tensor]


def problems(options: LossOptions, widths: tuple[int, ...], outputs: tuple[str, ...]) -> list[ShardProblem]:
    size, starts = sum(widths), [sum(widths[:rank]) for rank in range(len(widths))]
    shards = [VocabShard(start, start + width, size) for start, width in zip(starts, widths, strict=True)]
    return [ShardProblem.resolve(options, shard, len(shards), outputs) for shard in shards]


def run(
    backend: Backend,
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    widths: tuple[int, ...] | None = None,
    outputs: tuple[str, ...] = (),
    row_scale: Tensor | None = None,
) -> Results:
    """Logits cut into shards of `widths`, as that many ranks would; None: the way of one rank."""
    if widths is None:
        (problem,) = problems(options, (logits.shape[-1],), outputs)
        loss, saved, values = backend.row_loss(logits, target, problem, row_scale)
    else:
        each = problems(options, widths, outputs)
        shards = logits.split(list(widths), -1)
        stats = [
            backend.row_statistics(shard, target, problem, row_scale)
            for shard, problem in zip(shards, each, strict=True)
        ]
        loss, saved, values = backend.merge_statistics(torch.cat(stats), target, each[0], row_scale)
    return Results(loss, saved, dict(zip(outputs, values, strict=True)))


def check(got: Results, truth: Results, z_error: float = 0.0, scale: float = 1.0) -> None:
    """Every value within its bound; NaN, infinities and what ignored rows have exactly where the truth has them.

    Args:
        z_error: of every logit.
    """
    check_within("loss", got.loss, truth.loss, 4e-7, 2 * z_error * scale)
    for name, value in truth.outputs.items():
        assert got.outputs[name].shape == got.loss.shape
        assert got.outputs[name].is_contiguous()
        if name == "predictions":
            assert torch.equal(got.outputs[name].cpu(), value.cpu())
        else:
            check_within(name, got.outputs[name], value, 1e-6 if name == "entropy" else 4e-7, 4 * z_error * scale)


def check_within(name: str, got: Tensor, truth: Tensor, relative: float, absolute: float) -> None:
    got, truth = got.double().cpu(), truth.cpu()
    finite = truth.isfinite()
    assert torch.equal(got[~finite].nan_to_num(1.5, 2.5, 3.5), truth[~finite].nan_to_num(1.5, 2.5, 3.5)), name
    error = (got - truth).abs()[finite]
    bound = relative * truth[finite].abs().clamp(min=1.0) + absolute
    assert (error <= bound).all(), f"{name}: error {error.max():.3g}, {(error / bound).max():.3g} of the bound"
    assert torch.equal(got == 0.0, truth == 0.0) or name in ("loss", "entropy", "log_probs"), name


def draw(
    columns: int, rows: tuple[int, ...] = (2, 5), dtype: torch.dtype = torch.float32, spread: float = 3.0
) -> tuple[Tensor, Tensor]:
    """Logits, and targets of which one is ignored and one is no class."""
    random = torch.Generator().manual_seed(columns)
    logits = (torch.randn(*rows, columns, generator=random) * spread).to(dtype)
    target = torch.randint(columns, rows, generator=random)
    target.view(-1)[1] = -100
    target.view(-1)[2] = columns
    return logits, target


def z_error_of(options: LossOptions, row_scale: Tensor | None = None) -> float:
    """Of the softcap, as promised; a scale adds none."""
    scale = abs(float(options.scale)) if row_scale is None else float(row_scale.abs().max())
    return 0.0 if options.softcap is None else 4 * UNIT * scale * options.softcap
