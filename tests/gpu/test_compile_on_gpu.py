"""torch.compile with its default compiler, and with CUDA graphs of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_ce import vocab_parallel_cross_entropy


# Inductor's own.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("columns", [32_000, 50_257])
def test_compiled_steps_give_the_numbers_of_eager(columns: int, mode: str) -> None:
    weight = torch.randn(64, columns, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def step(hidden: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(hidden @ weight, target, label_smoothing=0.1, reduction="mean")

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for seed in range(4):
        random = torch.Generator(device="cuda").manual_seed(seed)
        hidden = torch.randn(128, 64, generator=random, device="cuda").bfloat16().requires_grad_()
        target = torch.randint(columns, (128,), generator=random, device="cuda")
        target[:seed] = -100
        loss = compiled(hidden, target)
        (grad,) = torch.autograd.grad(loss, hidden)
        grad = grad.clone()
        expected = step(hidden, target)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(grad, torch.autograd.grad(expected, hidden)[0], rtol=2.0**-7, atol=1e-6)
