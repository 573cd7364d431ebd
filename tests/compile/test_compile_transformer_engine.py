"""torch.compile of Transformer Engine's interface: eager's numbers; a graph break only to overwrite the logits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from te_ce.transformer_engine import parallel_cross_entropy


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# torch's own look at the logits, where it leaves the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("alpha", "reduce"), [(0.0, False), (0.1, True), (1.0, False)])
def test_numbers_of_eager(monkeypatch: pytest.MonkeyPatch, alpha: float, reduce: bool, overwrite: bool) -> None:
    monkeypatch.setenv("TE_CE_BACKEND", "torch")

    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = hidden @ weight
        loss = parallel_cross_entropy(logits, target, alpha, reduce, overwrite_input=overwrite)
        if not overwrite:
            logits.detach().zero_()  # the caller's again
        return loss

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=not overwrite)):
        random = torch.Generator().manual_seed(3)
        hidden = torch.randn(2, 5, 24, generator=random).requires_grad_()
        weight = torch.randn(24, 40, generator=random).requires_grad_()
        target = torch.randint(40, (2, 5), generator=random)
        target[0, 1] = -100
        loss = function(hidden, weight, target)
        loss.backward(torch.linspace(-1, 1, loss.numel()).view(loss.shape))
        results.append((loss.detach(), hidden.grad, weight.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
