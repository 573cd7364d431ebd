"""CUDA graphs: captured once, replayed with other logits, other targets and another number of ignored rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, vocab_parallel_cross_entropy
from te_ce.outputs import OUTPUTS
from tests.support.graphs import captured, new_inputs

_COLUMNS = [1000, 50_257, 128_256]  # one part, rows that begin inside a vector, several parts
_ROWS = 64


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("columns", _COLUMNS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_replayed_with_new_data(columns: int, alpha: float, reduction: str) -> None:
    options = LossOptions(label_smoothing=alpha, reduction=reduction)
    logits = torch.empty(_ROWS, columns, dtype=torch.bfloat16, device="cuda")
    target = torch.empty(_ROWS, dtype=torch.int64, device="cuda")
    g = torch.empty(_ROWS, device="cuda")
    new_inputs(logits, target, g, columns, 3, 0)
    logits.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        loss = vocab_parallel_cross_entropy(logits, target, options=options)
        upstream = g if reduction == "none" else g[0]
        (grad,) = torch.autograd.grad(loss, logits, upstream)
        return loss.detach(), grad

    graph, (loss, grad) = captured(step)
    for seed, ignored in ((1, 0), (2, 40), (3, _ROWS), (4, 1)):
        with torch.no_grad():
            new_inputs(logits, target, g, columns, ignored, seed)
        loss.fill_(torch.nan)
        grad.fill_(torch.nan)
        graph.replay()
        expected_loss, expected_grad = step()
        assert torch.equal(loss, expected_loss)
        assert torch.equal(grad, expected_grad)
        assert grad.isfinite().all()
        assert (grad[:ignored] == 0).all()


@pytest.mark.parametrize("columns", _COLUMNS)
def test_options_and_outputs_replayed_with_new_data(columns: int) -> None:
    logits = torch.empty(_ROWS, columns, dtype=torch.bfloat16, device="cuda")
    target = torch.empty(_ROWS, dtype=torch.int64, device="cuda")
    g, scale = torch.empty(_ROWS, device="cuda"), torch.ones(_ROWS, device="cuda")
    new_inputs(logits, target, g, columns, 3, 0)
    logits.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        out = vocab_parallel_cross_entropy(
            logits, target, outputs=OUTPUTS, scale=scale, softcap=20.0, z_loss_weight=1e-3, label_smoothing=0.1
        )
        differentiable = (out.loss, out.log_probs, out.entropy, out.lse)
        (grad,) = torch.autograd.grad(differentiable, logits, (g, g * 2, g * 3, g * 4))
        return grad, *(value.detach() for value in out)

    graph, replayed = captured(step)
    for seed, ignored in ((1, 0), (2, 40), (3, _ROWS), (4, 1)):
        with torch.no_grad():
            new_inputs(logits, target, g, columns, ignored, seed)
            scale.uniform_(0.5, 2.0)
        for value in replayed:
            value.fill_(-1)
        graph.replay()
        for value, expected in zip(replayed, step(), strict=True):
            assert torch.equal(value, expected)
        assert (replayed[0][:ignored] == 0).all()
        assert replayed[0].isfinite().all()


class _Head(torch.autograd.Function):
    """Logits that only the loss holds; whether their gradient arrived in their storage is recorded."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, taken: list[bool]) -> Tensor:  # type: ignore[no-untyped-def, override]
        logits = hidden @ weight
        ctx.address, ctx.taken = logits.data_ptr(), taken
        ctx.save_for_backward(hidden, weight)
        return logits

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def, override]
        ctx.taken.append(grad.data_ptr() == ctx.address)
        hidden, weight = ctx.saved_tensors
        return grad @ weight.t(), hidden.t() @ grad, None


def test_logits_made_in_the_graph_are_overwritten() -> None:
    hidden = torch.randn(_ROWS, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(64, 50_304, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target = torch.randint(50_304, (_ROWS,), device="cuda")

    def step() -> tuple[Tensor, ...]:
        loss = vocab_parallel_cross_entropy(_Head.apply(hidden, weight, taken), target)
        return loss.detach(), *torch.autograd.grad(loss.sum(), (hidden, weight))

    taken: list[bool] = []
    graph, outputs = captured(step)
    assert taken[-1], "in the captured step"
    with torch.no_grad():
        hidden.normal_()
        target.random_(50_304)
    graph.replay()
    for replayed, expected in zip(outputs, step(), strict=True):
        assert torch.equal(replayed, expected)


# torch's own warning about its own warm-up on a side stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_graphed_callables() -> None:
    logits = torch.randn(_ROWS, 32_000, device="cuda", requires_grad=True)
    target = torch.randint(32_000, (_ROWS,), device="cuda")
    graphed = torch.cuda.make_graphed_callables(vocab_parallel_cross_entropy, (logits, target))
    other = torch.randn(_ROWS, 32_000, device="cuda", requires_grad=True)
    other_target = torch.randint(32_000, (_ROWS,), device="cuda")
    loss = graphed(other, other_target)
    (grad,) = torch.autograd.grad(loss.sum(), other)
    expected = vocab_parallel_cross_entropy(other, other_target)
    assert torch.equal(loss, expected)
    assert torch.equal(grad, torch.autograd.grad(expected.sum(), other)[0])
