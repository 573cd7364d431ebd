"""One provider on one problem: its loss and gradients checked, its memory measured, then ready to be timed in turn."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from benchmarks.linear.problem import MEAN_UPSTREAM, Errors, Problem, Truth
from benchmarks.linear.providers import Provider
from benchmarks.measure import on_gpu, peak_extra_bytes
from benchmarks.results import Row

# Of a loss, relative: it is made of logits that are rounded to 16 bits, and averaged over the rows.
LOSS_BOUND = 2.0**-9


class WrongAnswer(Exception):
    """A provider's loss or gradient is too far from float64; `errors` are the columns that say how far."""

    def __init__(self, what: str, errors: Row) -> None:
        super().__init__(f"wrong against float64: {what}")
        self.errors = errors


class Trial:
    """Forward and backward of one provider, from the mean loss to the gradients of hidden states and weight."""

    def __init__(self, provider: Provider, problem: Problem) -> None:
        self.provider, self.problem = provider, problem
        self._tensors = problem.hidden, problem.weight, problem.target

    def both(self, _: object = None) -> tuple[Tensor, ...]:
        """What is timed: the gradients of the mean loss."""
        return self._gradients(self.provider.mean(*self._tensors))

    def check(self, truth: Truth) -> Row:
        """The errors as columns; raises `WrongAnswer`."""
        loss = self.provider.mean(*self._tensors)
        errors = truth.errors_of_mean(loss, *self._gradients(loss, MEAN_UPSTREAM))
        row: Row = {"loss_error": errors.loss, "dx_error": errors.hidden, "dw_error": errors.weight}
        self._refuse_wrong(errors, row, "the mean")
        del loss
        if self.provider.weighted is not None:
            loss = self.provider.weighted(*self._tensors, self.problem.token_weights)
            errors = truth.errors_of_weighted(loss, *self._gradients(loss))
            row |= {"weighted_dx_error": errors.hidden, "weighted_dw_error": errors.weight}
            self._refuse_wrong(errors, row, "token weights")
        return row

    def memory(self) -> Row:
        """Peak above operands and whatever else is allocated, gradients included, as columns; nothing on a CPU."""
        if not on_gpu(self.problem.hidden.device):
            return {}
        return {"extra_bytes": peak_extra_bytes(self.both, gc.collect)}

    def _gradients(self, loss: Tensor, upstream: float = 1.0) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, self._tensors[:2], torch.full_like(loss, upstream))

    def _refuse_wrong(self, errors: Errors, row: Row, of_what: str) -> None:
        bounds = Errors(LOSS_BOUND, self.provider.bound, self.provider.bound)
        for name, error, bound in zip(("loss", "dX", "dW"), errors, bounds, strict=True):
            # Not the other way round: NaN is refused.
            if not error <= bound:
                raise WrongAnswer(f"{name} of {of_what} is off by {error:.1e}, more than {bound:.1e}", row)
