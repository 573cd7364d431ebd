"""One problem: logits, targets, upstream gradients, and what loss and gradient should be in float64.

N rows, V columns over all ranks, V_local = V / W columns of this rank. The truth is made of all columns of the rows
it covers: of all rows for the loss in one process, of a sample of them for the gradient and under tensor parallelism.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.measure import restore

IGNORE_INDEX = -100
# Rows whose gradient is compared, evenly spaced; also the rows that are held in float64 at a time.
SAMPLE = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """What is asked of a loss: the shape over all ranks, and at most a few options that change the problem."""

    rows: int
    columns: int
    dtype: torch.dtype
    label_smoothing: float = 0.0
    ignored: float = 0.0
    padding: int = 0

    @property
    def classes(self) -> int:
        """Columns that are classes; the last `padding` columns take no part."""
        return self.columns - self.padding

    @property
    def options(self) -> dict[str, float]:
        """The options that are set, by name."""
        values = {"label_smoothing": self.label_smoothing, "ignored": self.ignored, "padding": self.padding}
        return {name: value for name, value in values.items() if value}

    @property
    def option(self) -> str:
        """The options as text: "plain", "ignored=0.3"."""
        return " ".join(f"{name}={value:g}" for name, value in self.options.items()) or "plain"


class Problem:
    """Tensors of one case on this rank.

    logits [N, V_local], a leaf that providers may overwrite; `reset` puts the values of `pristine` back.
    target [N] int64, global ids; upstream [N] float32 in [0.5, 1.5), the gradient of the loss of each row.
    """

    def __init__(self, case: Case, device: torch.device, group: ProcessGroup | None = None) -> None:
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        if case.columns % world:
            raise ValueError(f"columns: expected a multiple of the {world} ranks, got {case.columns}")
        self.case, self.world = case, world
        self.width = case.columns // world
        self.start = rank * self.width
        own = torch.Generator(device).manual_seed(1000 + rank)
        self.pristine = torch.empty(case.rows, self.width, dtype=case.dtype, device=device).normal_(generator=own)
        shared = torch.Generator().manual_seed(1)
        target = torch.randint(case.classes, (case.rows,), generator=shared)
        target[torch.rand(case.rows, generator=shared) < case.ignored] = IGNORE_INDEX
        self.target = target.to(device)
        self.upstream = (torch.rand(case.rows, generator=shared) + 0.5).to(device)
        self.logits = self.pristine.clone().requires_grad_()
        self.sample = torch.linspace(0, case.rows - 1, min(SAMPLE, case.rows)).long().unique().to(device)
        self._make_truth(group)

    @property
    def bytes(self) -> int:
        """Size of this rank's logits."""
        return self.pristine.numel() * self.pristine.element_size()

    def reset(self) -> None:
        """Undo what a provider did to the logits."""
        restore(self.logits, self.pristine)

    def errors(self, loss: Tensor, gradient: Tensor, upstream: Tensor) -> tuple[float, float]:
        """Relative errors of a loss and of the gradient that `upstream` makes of it.

        Args:
            loss: [N], or the sum over the rows as a scalar (one rank only).
            gradient: [N, V_local].
            upstream: the shape of the loss.

        Returns:
            max |loss - truth| / max(1, |truth|) over the rows, and |gradient - truth| / |truth| in the 2-norm over the
            sampled rows: the larger of the targets' columns and the others. Apart, since the many small entries
            vanish in the norm beside the targets': a gradient without them would pass.
        """
        whole = loss.ndim == 0
        got = loss.detach().double().reshape(-1)
        truth = self.true_loss.sum()[None] if whole else self.true_loss
        if not whole and self.world > 1:
            got = got[self.sample]
        loss_error = ((got - truth).abs() / truth.abs().clamp(min=1)).max()
        scale = upstream.double() if whole else upstream.double()[self.sample, None]
        true_gradient = self.true_gradient * scale
        difference = gradient.detach().reshape(self.case.rows, self.width)[self.sample].double() - true_gradient
        columns = torch.arange(self.start, self.start + self.width, device=gradient.device)
        hit = columns == self.target[self.sample, None]
        parts = [_ratio(difference[part], true_gradient[part]) for part in (hit, ~hit)]
        return float(loss_error), float(torch.stack(parts).max())

    def _make_truth(self, group: ProcessGroup | None) -> None:
        rows = self.pristine[self.sample]
        if group:
            parts = [torch.empty_like(rows) for _ in range(self.world)]
            dist.all_gather(parts, rows, group=group)
            rows = torch.cat(parts, dim=1)
        x = rows.double().requires_grad_()
        loss = self._true_loss(x, self.target[self.sample])
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        self.true_gradient = gradient[:, self.start : self.start + self.width].clone()
        self.true_loss = loss.detach()
        if not group:
            chunks = zip(self.pristine.split(SAMPLE), self.target.split(SAMPLE), strict=True)
            self.true_loss = torch.cat([self._true_loss(x.double(), target) for x, target in chunks])

    def _true_loss(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            x[:, : self.case.classes],
            target,
            reduction="none",
            ignore_index=IGNORE_INDEX,
            label_smoothing=self.case.label_smoothing,
        )


def _ratio(difference: Tensor, truth: Tensor) -> Tensor:
    """0 for nothing against nothing, infinite for something against nothing."""
    return difference.norm() / truth.norm().clamp(min=1e-300)
