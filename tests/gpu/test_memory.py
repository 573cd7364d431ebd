"""Peak memory above the logits: a few floats a row where the model drops them; kept ones are not overwritten."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_ce import vocab_parallel_cross_entropy

_DTYPES = [torch.bfloat16, torch.float32]


class _Head(torch.autograd.Function):
    """Makes logits and swallows their gradient, so that only the loss allocates."""

    @staticmethod
    def forward(ctx, anchor: Tensor, logits: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        return logits.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return grad.new_zeros(()), None


def _peak_above(logits_bytes: int, run) -> int:  # type: ignore[no-untyped-def]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - logits_bytes


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_dropped_logits_cost_less_than_one_percent(dtype: torch.dtype, alpha: float) -> None:
    rows, columns = 4096, 32000
    anchor = torch.zeros((), device="cuda", requires_grad=True)
    target = torch.randint(columns, (rows,), device="cuda")
    size = rows * columns * dtype.itemsize

    def step() -> None:
        logits = _Head.apply(anchor, torch.empty(rows, columns, dtype=dtype, device="cuda").normal_())
        loss = vocab_parallel_cross_entropy(logits, target, label_smoothing=alpha)
        del logits
        loss.mean().backward()

    step()  # compiles
    extra = _peak_above(size, step)
    assert extra < 0.01 * size, f"{extra / size:.4f} of the logits"


def test_the_measurement_sees_a_buffer() -> None:
    rows, columns = 4096, 32000
    anchor = torch.zeros((), device="cuda", requires_grad=True)
    target = torch.randint(columns, (rows,), device="cuda")
    size = rows * columns * 2

    def step() -> None:
        logits = _Head.apply(anchor, torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_())
        vocab_parallel_cross_entropy(logits, target).mean().backward()  # `logits` is still held

    step()
    extra = _peak_above(size, step)
    assert 0.99 * size < extra < 1.01 * size


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_kept_logits_are_unchanged(dtype: torch.dtype) -> None:
    anchor = torch.zeros((), device="cuda", requires_grad=True)
    logits = _Head.apply(anchor, torch.empty(512, 32000, dtype=dtype, device="cuda").normal_())
    before = logits.clone()
    vocab_parallel_cross_entropy(logits, torch.randint(32000, (512,), device="cuda")).mean().backward()
    assert torch.equal(logits, before)
