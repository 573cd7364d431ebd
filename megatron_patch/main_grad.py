"""The weight's gradient, accumulated into `weight.main_grad` (gradient_accumulation_fusion), as Megatron's layer does.

What else is part of it: main_grad is the one of the forward, put back on the parameter in backward;
`grad_added_to_main_grad` tells Megatron's hooks not to add `.grad` as well; and they want to see some `.grad`, whose
values do not matter, except where `zero_out_wgrad` says that they will be added all the same, because the `.grad` of
a tied embedding is accumulated on top.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_ce.linear.products import add_product


class MainGradient:
    """Takes the gradient of `weight` [V / TP, H] by rows, into its `main_grad` of the same shape."""

    def __init__(self, weight: Tensor, main_grad: Tensor | None):
        """For one backward.

        Args:
            weight: the parameter.
            main_grad: what its `main_grad` was in forward; None: it had none yet.

        Raises:
            RuntimeError: there is none now either, or it is neither float32 nor of 16 bits.
        """
        main_grad = getattr(weight, "main_grad", None) if main_grad is None else main_grad
        if main_grad is None:
            raise RuntimeError(
                "gradient_accumulation_fusion: expected the output layer's weight to have a main_grad, found none; "
                "wrap the model in Megatron's DistributedDataParallel, or set gradient_accumulation_fusion=False"
            )
        if main_grad.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise RuntimeError(
                f"main_grad: expected float32, float16 or bfloat16 for gradient_accumulation_fusion, got "
                f"{main_grad.dtype}; set gradient_accumulation_fusion=False"
            )
        weight.main_grad = main_grad  # type: ignore[attr-defined]
        self._weight, self._main_grad = weight, main_grad

    def add(self, rows: slice, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add grad_logits^T hidden to `rows` of main_grad: [N, C] and [N, H] of one dtype, C the number of rows."""
        place, left = self._main_grad[rows], grad_logits.t()
        if place.dtype in (torch.float32, hidden.dtype):
            add_product(place, left, hidden)
        else:
            place.add_(left @ hidden)

    def result(self) -> Tensor | None:
        """What autograd gets: a tensor of the weight's shape and dtype to please the hooks, or None without them."""
        weight = self._weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
