"""Same bits on every run and for a row in any batch; no host synchronisation; no aliasing of kernel arguments."""

from __future__ import annotations

import pytest
import torch

from te_ce import LossOptions
from tests.support.no_sync import NoHostSync
from tests.support.subject import Subject, forget_launches


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("widths", [(5000,), (2500, 0, 2500)], ids=str)
@pytest.mark.usefixtures("poisoned")
def test_same_bits_on_every_run(subject: Subject, widths: tuple[int, ...], alpha: float) -> None:
    random = torch.Generator().manual_seed(17)
    logits = torch.randn(3, 5000, generator=random).bfloat16().to(subject.device)
    target = torch.randint(5000, (3,), generator=random).to(subject.device)
    g = torch.randn(3, generator=random).to(subject.device)
    options = LossOptions(label_smoothing=alpha)
    losses, grad = subject.run_shards(logits, target, g, options, widths)
    assert grad.isfinite().all()
    for _ in range(20 if "interpreter" not in subject.name else 3):
        again, grad_again = subject.run_shards(logits, target, g, options, widths)
        assert all(torch.equal(loss, losses[0]) for loss in again)
        assert torch.equal(grad, grad_again)


@pytest.mark.parametrize("columns", [96, 4096, 40_000])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_a_row_has_the_same_bits_in_any_batch(subject: Subject, columns: int, alpha: float) -> None:
    rows = 9 if columns < 40_000 else 3
    random = torch.Generator().manual_seed(19)
    logits = torch.randn(rows, columns, generator=random).to(subject.device)
    target = torch.randint(columns, (rows,), generator=random).to(subject.device)
    whole = logits.clone().requires_grad_()
    loss = subject.loss(whole, target, label_smoothing=alpha)
    loss.sum().backward()
    for row in range(rows):
        for stop in {row + 1, min(row + 2, rows)}:
            part = logits[row:stop].clone().requires_grad_()
            alone = subject.loss(part, target[row:stop], label_smoothing=alpha)
            alone.sum().backward()
            # The twin on CUDA is for finding faults: its sums are torch's, whose order depends on the batch.
            rtol, atol = (1e-5, 1e-7) if subject.name == "torch-cuda" else (0, 0)
            torch.testing.assert_close(alone[0], loss[row], rtol=rtol, atol=atol)
            torch.testing.assert_close(part.grad[0], whole.grad[row], rtol=rtol, atol=atol)


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("columns", [40, 1032, 4104])
def test_the_place_of_a_row_beyond_16_bytes_does_not_matter(subject: Subject, columns: int, alpha: float) -> None:
    # Whole vectors of 16 bytes, but no whole lines of memory: in a batch, rows begin elsewhere in their lines.
    random = torch.Generator().manual_seed(29)
    row = torch.randn(columns, generator=random).mul_(3).bfloat16().to(subject.device)
    target = torch.tensor([columns // 2], device=subject.device)
    storage = torch.zeros(128 + columns, dtype=torch.bfloat16, device=subject.device)
    results = []
    for offset in range(0, 72, 8):
        logits = storage[offset : offset + columns].view(1, columns)
        logits.copy_(row)
        leaf = logits.detach().requires_grad_()
        loss = subject.loss(leaf, target, label_smoothing=alpha, inplace=False)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        results.append((loss.detach(), grad))
    for loss, grad in results:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(grad, results[0][1])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("inplace", ["auto", False, True])
def test_nothing_waits_for_the_device(subject: Subject, reduction: str, inplace: object) -> None:
    leaf = torch.randn(4, 16, device=subject.device, requires_grad=True)
    target = torch.tensor([1, -100, 3, 2], device=subject.device)
    with NoHostSync():
        loss = subject.loss(leaf * 1.0, target, reduction=reduction, inplace=inplace, label_smoothing=0.1)
        loss.backward(torch.ones_like(loss))
    assert leaf.grad.isfinite().all()


def test_the_sync_detector_detects() -> None:
    with pytest.raises(AssertionError, match="host synchronisation"), NoHostSync():
        torch.ones(1).item()


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernel_arguments_are_distinct_tensors(
    subject: Subject, dtype: torch.dtype, alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not subject.name.startswith("triton"):
        # The twin launches nothing; its in-place behaviour is tested with the public function.
        assert subject.backend.name == "torch"
        return
    from te_ce.kernels import launch, launch_gradient

    launches: list[str] = []

    def spy(name: str) -> None:
        launcher = launch_gradient if name == "logits_gradient_kernel" else launch
        kernel = getattr(launcher, name)

        class Spy:
            def __getitem__(self, grid):  # type: ignore[no-untyped-def]
                def run(*args, **kwargs):  # type: ignore[no-untyped-def]
                    addresses = [arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
                    assert len(set(addresses)) == len(addresses), f"{name}: one tensor for two pointers"
                    launches.append(name)
                    return kernel[grid](*args, **kwargs)

                return run

        monkeypatch.setattr(launcher, name, Spy())

    whole = ["row_loss_kernel", "logits_gradient_kernel"]
    in_parts = ["row_statistics_kernel", "merge_statistics_kernel", "logits_gradient_kernel"]
    forget_launches(monkeypatch)
    for name in {*whole, *in_parts}:
        spy(name)
    leaf = torch.randn(4, 16, device=subject.device).to(dtype).requires_grad_()
    target = torch.tensor([1, -100, 3, 2], device=subject.device)
    subject.loss(leaf, target, label_smoothing=alpha, inplace=False).sum().backward()
    assert launches == whole
    forget_launches(monkeypatch)
    with subject.reading_in_parts_of(8):
        subject.loss(leaf, target, label_smoothing=alpha, inplace=False).sum().backward()
    assert launches == whole + in_parts
