"""torch.compile of functions that contain the linear loss: a break of the graph, and eager's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_ce import linear_cross_entropy

# torch's own look at the hidden states, where they leave the graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 5, 12, generator=random).requires_grad_()
    weight = torch.randn(37, 12, generator=random).requires_grad_()
    bias = torch.randn(37, generator=random).requires_grad_()
    target = torch.randint(37, (2, 5), generator=random)
    target[0, 1] = -100
    return hidden, weight, bias, target


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"keep": 0.5},
        {"reduction": "mean", "label_smoothing": 0.1, "check_targets": True},
        {"token_weights": torch.linspace(-1, 1, 10).view(2, 5), "reduction": "sum"},
        {"scale": torch.linspace(0.5, 1, 10).view(2, 5), "softcap": 5.0},
    ],
    ids=lambda keywords: "+".join(keywords),
)
def test_the_numbers_of_eager(keywords: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", "10")

    def step(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = linear_cross_entropy(hidden * 2, weight, target, bias=bias, **keywords)
        return loss.sum() * 3

    results = []
    for function in (step, torch.compile(step, backend=backend)):
        hidden, weight, bias, target = _inputs()
        loss = function(hidden, weight, bias, target)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad, bias.grad))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_the_graph_breaks() -> None:
    torch._dynamo.reset()
    hidden, weight, _, target = _inputs()
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(hidden, weight, target)


def test_errors_are_those_of_eager() -> None:
    torch._dynamo.reset()
    hidden, weight, _, target = _inputs()
    compiled = torch.compile(lambda *tensors: linear_cross_entropy(*tensors, keep=5), backend="eager")
    with pytest.raises(ValueError, match="keep: expected"):
        compiled(hidden, weight, target)
