"""The GEMMs that no fused linear + loss can do without, through the device's own library.

logits = hidden weight^T, dX = G weight, dW = G^T hidden, with G [N, V] a true gradient of the logits: data of another
kind would cost a GPU other power, and so another clock. Four GEMMs are what whoever recomputes the logits does, three
what whoever makes them once does. Operands and results have the problem's dtype; all is allocated beforehand.
"""

from __future__ import annotations

import torch

from benchmarks.linear.problem import Problem, Truth

THREE, FOUR = "3 GEMM", "4 GEMM"


class Floors:
    """Three and four GEMMs of one problem."""

    def __init__(self, problem: Problem, truth: Truth) -> None:
        self._hidden, self._weight, self._gradient = problem.hidden.detach(), problem.weight.detach(), truth.logits
        self._logits = torch.empty_like(self._gradient)
        self._d_hidden, self._d_weight = torch.empty_like(self._hidden), torch.empty_like(self._weight)

    def three(self, _: object = None) -> None:
        """Logits once, and both gradients."""
        self._make_logits()
        torch.mm(self._gradient, self._weight, out=self._d_hidden)
        torch.mm(self._gradient.T, self._hidden, out=self._d_weight)

    def four(self, _: object = None) -> None:
        """Logits twice, and both gradients."""
        self._make_logits()
        self.three()

    def _make_logits(self) -> None:
        torch.mm(self._hidden, self._weight.T, out=self._logits)
