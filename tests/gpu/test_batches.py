"""A row's loss and gradient have the same bits alone, in a batch of 8192, and on every run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.compiler import LazyDict

from te_ce import vocab_parallel_cross_entropy


def _loss_and_gradient(logits: Tensor, target: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, target, label_smoothing=alpha, inplace=False)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), grad


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("columns", [16_000, 32_000, 128_256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_alone_and_among_8192(dtype: torch.dtype, columns: int, alpha: float) -> None:
    random = torch.Generator(device="cuda").manual_seed(5)
    logits = torch.empty(8192, columns, dtype=dtype, device="cuda").normal_(0, 3, generator=random)
    target = torch.randint(columns, (8192,), generator=random, device="cuda")
    loss, grad = _loss_and_gradient(logits, target, alpha)
    again, grad_again = _loss_and_gradient(logits, target, alpha)
    assert torch.equal(loss, again)
    assert torch.equal(grad, grad_again)
    for rows in (slice(0, 1), slice(17, 18), slice(4000, 4003), slice(8191, 8192), slice(1, 512)):
        # Rows of another address, as in a batch of their own.
        alone, grad_alone = _loss_and_gradient(logits[rows].clone(), target[rows], alpha)
        assert torch.equal(alone, loss[rows])
        assert torch.equal(grad_alone, grad[rows])


def test_nothing_is_launched_more_often_than_needed() -> None:
    for columns, launches in ((32_000, 2), (50_257, 2), (128_256, 3)):
        logits = torch.randn(64, columns, device="cuda", requires_grad=True)
        target = torch.randint(columns, (64,), device="cuda")
        g = torch.ones(64, device="cuda")
        vocab_parallel_cross_entropy(logits, target, inplace=False).backward(g)
        logits.grad = None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            vocab_parallel_cross_entropy(logits, target, inplace=False).backward(g)
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert len(kernels) == launches, kernels


def test_a_profilers_hook_sees_every_launch() -> None:
    logits = torch.randn(64, 32_000, device="cuda", requires_grad=True)
    target = torch.randint(32_000, (64,), device="cuda")
    names: list[str] = []

    def hook(metadata: LazyDict) -> None:
        names.append(metadata.get()["name"])

    for _ in range(2):
        vocab_parallel_cross_entropy(logits, target, inplace=False).sum().backward()
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        vocab_parallel_cross_entropy(logits, target, inplace=False).sum().backward()
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert names == ["row_loss_kernel", "logits_gradient_kernel"]
