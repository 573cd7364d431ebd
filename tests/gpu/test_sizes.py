"""Real sizes: past 2^31 elements, past 65,535 rows, odd vocabularies; each against float64 on sampled rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, vocab_parallel_cross_entropy
from tests.support.bounds import check_gradient, check_loss
from tests.support.dense import dense


def _check(rows: int, columns: int, dtype: torch.dtype, options: LossOptions, sample: list[int]) -> None:
    random = torch.Generator(device="cuda").manual_seed(23)
    logits = torch.empty(rows, columns, dtype=dtype, device="cuda").normal_(0, 2, generator=random)
    target = torch.randint(options.vocab_size or columns, (rows,), generator=random, device="cuda")
    target[1] = options.ignore_index
    g = torch.randn(rows, generator=random, device="cuda")
    inputs = logits[sample].clone()
    loss, grad = _overwriting(logits, target, g, options)
    truth = dense(inputs, target[sample], options, g[sample])
    check_loss(loss[sample], truth)
    check_gradient(grad[sample], truth, inputs, target[sample], options, g[sample], 0.5)
    assert (grad[1] == 0).all()
    assert loss.isfinite().all()


def _overwriting(logits: Tensor, target: Tensor, g: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, options=options, inplace=True)
    loss.backward(g)
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_more_than_2_31_elements(alpha: float) -> None:
    rows, columns = 17_000, 128_256
    assert rows * columns > 2**31
    _check(rows, columns, torch.bfloat16, LossOptions(label_smoothing=alpha), [0, 1, 2, 16_743, 16_744, rows - 1])


def test_70_000_rows() -> None:
    _check(70_000, 8_000, torch.bfloat16, LossOptions(), [0, 1, 65_534, 65_535, 65_536, 69_999])


@pytest.mark.parametrize("columns", [50_257, 151_643, 151_647, 129_920 // 64, 100_003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_odd_vocabularies(columns: int, dtype: torch.dtype) -> None:
    for options in (LossOptions(), LossOptions(label_smoothing=0.1, smoothing="others", vocab_size=columns - 5)):
        _check(64, columns, dtype, options, list(range(64)))
