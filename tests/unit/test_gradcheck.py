"""torch's own check of the derivatives of the loss and every differentiable output: finite differences in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, vocab_parallel_log_probs
from tests.support.subject import Subject

_OPTIONS = {
    "plain": LossOptions(),
    "scale": LossOptions(scale=-0.7),
    "row_scale": LossOptions(scale=torch.tensor([0.5, -1.3, 2.0, 1.0])),
    "softcap": LossOptions(softcap=1.5),
    "z_loss": LossOptions(z_loss_weight=0.3),
    "uniform": LossOptions(label_smoothing=0.2),
    "others": LossOptions(label_smoothing=0.2, smoothing="others"),
    "padded": LossOptions(vocab_size=5),
    "sum": LossOptions(reduction="sum", z_loss_weight=0.3),
    "mean": LossOptions(reduction="mean", label_smoothing=0.2),
    "all": LossOptions(
        scale=1.3,
        softcap=2.0,
        z_loss_weight=0.1,
        label_smoothing=0.1,
        smoothing="others",
        vocab_size=5,
        reduction="mean",
    ),
}


def _inputs(subject: Subject) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(29)
    logits = torch.randn(4, 7, generator=random, dtype=torch.float64).to(subject.device).requires_grad_()
    return logits, torch.tensor([0, 4, -100, 2], device=subject.device)


def _options(name: str, subject: Subject) -> LossOptions:
    options = _OPTIONS[name]
    if isinstance(options.scale, Tensor):
        return LossOptions(scale=options.scale.to(subject.device))
    return options


@pytest.mark.parametrize("inplace", ["auto", False])
@pytest.mark.parametrize("name", _OPTIONS)
def test_loss_and_outputs(twin: Subject, name: str, inplace: object) -> None:
    logits, target = _inputs(twin)
    options = _options(name, twin)

    def values(x: Tensor) -> tuple[Tensor, ...]:
        got = twin.loss(x * 1.0, target, options=options, outputs=("log_probs", "entropy", "lse"), inplace=inplace)
        return got.loss, got.log_probs, got.entropy, got.lse

    assert all(value.dtype == torch.float64 for value in values(logits))
    assert torch.autograd.gradcheck(values, (logits,))
    plain = twin.loss(logits, target, options=options, inplace=inplace)
    torch.testing.assert_close(plain, values(logits)[0], rtol=0, atol=0)
    assert torch.autograd.gradcheck(lambda x: twin.loss(x, target, options=options, inplace=inplace), (logits,))


@pytest.mark.parametrize("name", ["plain", "scale", "row_scale", "softcap", "padded"])
def test_log_probs(twin: Subject, name: str) -> None:
    logits, target = _inputs(twin)
    options = _options(name, twin)

    def values(x: Tensor) -> tuple[Tensor, ...]:
        with twin.serving():
            return vocab_parallel_log_probs(x, target, options=options, entropy=True)

    assert torch.autograd.gradcheck(values, (logits,))
