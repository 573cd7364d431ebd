"""Where the gradient of the weight goes, one chunk of its rows after the other."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from te_ce.linear.products import set_product


class WeightGradient(Protocol):
    """Takes the gradient of [V_local, H] by rows; made anew for every backward."""

    def add(self, rows: slice, grad_logits: Tensor, hidden: Tensor) -> None:
        """grad_logits^T hidden belongs to these rows; each row comes once, those of padding columns never.

        Args:
            grad_logits: [N, C], C the number of rows; its memory is used again afterwards.
            hidden: [N, H].
        """

    def result(self) -> Tensor | None:
        """What autograd gets as the weight's gradient, once all rows were added."""


class NewWeightGradient:
    """A new tensor: every row is rounded once from its sum over all tokens, which cuBLAS makes in float32."""

    def __init__(self, weight: Tensor, real_rows: int) -> None:
        """Of a weight whose rows from `real_rows` on are padding, with gradient 0."""
        self._grad = torch.empty_like(weight)
        self._grad[real_rows:] = 0.0

    def add(self, rows: slice, grad_logits: Tensor, hidden: Tensor) -> None:
        """See `WeightGradient`."""
        set_product(self._grad[rows], grad_logits.t(), hidden)

    def result(self) -> Tensor:
        """See `WeightGradient`."""
        return self._grad
