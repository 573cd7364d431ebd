"""One problem: hidden states, weight, targets, and what loss and gradients should be in float64.

N rows, H hidden, V columns. The truth is made of the same rounded operands, some rows at a time, with logits that
nobody rounds: what an implementation rounds on its way is part of its error.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

# Of the loss of the check with one upstream gradient for all rows: not 1, which some take for "no factor".
MEAN_UPSTREAM = 0.75
# Float64 logits that are held at a time; rows of the weight's gradient that are compared at a time.
_CHUNK_BYTES = 1 << 30
_COMPARED_ROWS = 8192


class Shape(NamedTuple):
    """Sizes of a problem."""

    rows: int
    hidden: int
    columns: int

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A shape of the command line."""
        try:
            shape = cls(*map(int, text.split("x")))
        except (ValueError, TypeError):
            raise argparse.ArgumentTypeError(
                f"expected rows x hidden x columns such as 8192x4096x128256, got {text!r}"
            ) from None
        if min(shape) < 1:
            raise argparse.ArgumentTypeError(f"expected at least one row, hidden unit and column, got {text!r}")
        return shape


class Errors(NamedTuple):
    """Relative errors: of the loss, and in the 2-norm of the gradients.

    `weight` is the larger one of the rows that are some token's target and of the others. Apart, since the many small
    entries vanish in the norm beside the targets': a gradient without them would pass.
    """

    loss: float
    hidden: float
    weight: float


class Problem:
    """Tensors of one shape.

    hidden [N, H] of unit variance and weight [V, H], leaves; the logits' standard deviation is `spread`.
    target [N] int64; token_weights [N] float32 in [0.5, 1.5).
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, spread: float) -> None:
        self.shape, self.dtype = shape, dtype
        generator = torch.Generator(device).manual_seed(1)

        def normal(*size: int, deviation: float) -> Tensor:
            values = torch.empty(size, dtype=dtype, device=device).normal_(std=deviation, generator=generator)
            return values.requires_grad_()

        self.hidden = normal(shape.rows, shape.hidden, deviation=1.0)
        self.weight = normal(shape.columns, shape.hidden, deviation=spread / shape.hidden**0.5)
        self.target = torch.randint(shape.columns, (shape.rows,), device=device, generator=generator)
        self.token_weights = torch.rand(shape.rows, device=device, generator=generator) + 0.5


class Truth:
    """Loss of every row, and gradients of the sum of all rows' losses and of sum(token_weights L).

    loss [N] float64; hidden [N, H] is the gradient of each row's own loss; logits [N, V] of the problem's dtype is the
    gradient of the mean loss, which the GEMMs of the floors multiply.
    """

    def __init__(self, problem: Problem) -> None:
        rows, _, columns = problem.shape
        self._problem = problem
        hidden, weight = problem.hidden.detach().double(), problem.weight.detach().double()
        self.loss = hidden.new_empty(rows)
        self.hidden = torch.empty_like(hidden, dtype=torch.float32)
        self.logits = torch.empty(rows, columns, dtype=problem.dtype, device=hidden.device)
        of_sum, of_weighted = torch.zeros_like(weight), torch.zeros_like(weight)
        chunk = max(1, _CHUNK_BYTES // (8 * columns))
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            gradient = self._solve(part, hidden[part] @ weight.T)
            self.hidden[part] = (gradient @ weight).float()
            of_sum.addmm_(gradient.T, hidden[part])
            self.logits[part] = (gradient / rows).to(problem.dtype)
            gradient *= problem.token_weights[part, None]
            of_weighted.addmm_(gradient.T, hidden[part])
        self.weight, self.weight_weighted = of_sum.float(), of_weighted.float()
        self._is_target = torch.zeros(columns, dtype=torch.bool, device=hidden.device)
        self._is_target[problem.target] = True

    def _solve(self, part: slice, logits: Tensor) -> Tensor:
        """Write the rows' losses; returns the gradient of the logits of each row's own loss."""
        target = self._problem.target[part, None]
        lse = logits.logsumexp(dim=1, keepdim=True)
        self.loss[part] = (lse - logits.gather(1, target)).squeeze(1)
        gradient = logits.sub_(lse).exp_()
        return gradient.scatter_add_(1, target, gradient.new_full(target.shape, -1.0))

    def errors_of_mean(self, loss: Tensor, hidden: Tensor, weight: Tensor) -> Errors:
        """Of the mean loss, and the gradients that the upstream gradient MEAN_UPSTREAM makes of it."""
        factor = MEAN_UPSTREAM / self._problem.shape.rows
        return Errors(
            _relative(loss, self.loss.mean()),
            _norm_ratio(hidden, self.hidden * factor),
            self._weight_error(weight, self.weight, factor),
        )

    def errors_of_weighted(self, loss: Tensor, hidden: Tensor, weight: Tensor) -> Errors:
        """Of sum(token_weights L) with upstream gradient 1."""
        of_rows = self._problem.token_weights
        return Errors(
            _relative(loss, (self.loss * of_rows).sum()),
            _norm_ratio(hidden, self.hidden * of_rows[:, None]),
            self._weight_error(weight, self.weight_weighted, 1.0),
        )

    def _weight_error(self, got: Tensor, truth: Tensor, factor: float) -> float:
        squares = []
        for ours, right in zip(got.detach().split(_COMPARED_ROWS), truth.split(_COMPARED_ROWS), strict=True):
            expected = right.double() * factor
            difference = ours.double() - expected
            squares.append(torch.stack([difference.square().sum(dim=1), expected.square().sum(dim=1)]))
        each = torch.cat(squares, dim=1)
        parts = [each[:, chosen].sum(dim=1) for chosen in (self._is_target, ~self._is_target)]
        return max(float((of_error / of_truth.clamp(min=1e-300)).sqrt()) for of_error, of_truth in parts)


def _relative(got: Tensor, truth: Tensor) -> float:
    return float((got.detach().double() - truth).abs() / truth.abs().clamp(min=1.0))


def _norm_ratio(got: Tensor, truth: Tensor) -> float:
    """Infinite for something against nothing, as good as 0 for nothing against nothing."""
    expected = truth.double()
    return float((got.detach().double() - expected).norm() / expected.norm().clamp(min=1e-300))
