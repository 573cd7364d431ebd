"""A scale costs no precision: differences to the max are multiplied by it, and no rounded z is subtracted."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.broken_whole import z_rounded_first
from tests.support.subject import Subject
from tests.support.whole import Drawn, check_whole, run_whole

_ROWS, _COLUMNS = 16, 600
# Of one rank, of two, and of four of which one has no columns.
_WIDTHS = [(600,), (250, 350), (250, 0, 206, 144)]
_SMOOTHED = LossOptions(label_smoothing=0.1, z_loss_weight=0.01)


def _rows(spread: float, offset: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(3)
    return (torch.randn(_ROWS, _COLUMNS, generator=random) * spread + offset).to(dtype)


def _equal_terms() -> Tensor:
    """Half of the probability on one column, the rest on all others alike: their errors add up."""
    x = torch.zeros(_ROWS, _COLUMNS)
    x[:, 1:] = -math.log(_COLUMNS) * torch.linspace(0.9, 1.2, _ROWS)[:, None]
    return x


_OFFSET = _rows(3.0, 1e4)
_WIDE = _rows(30.0, dtype=torch.bfloat16)
_ROW_SCALE = torch.tensor([0.7, -1.3, 0.01, 2.7]).repeat(_ROWS // 4)

# Logits and options.
_CASES: dict[str, tuple[Tensor, LossOptions]] = {
    "offset": (_OFFSET, LossOptions(scale=0.7)),
    "offset_negative": (_OFFSET, LossOptions(scale=-0.7)),
    "offset_smoothed": (_OFFSET, LossOptions(scale=0.7, label_smoothing=0.1)),
    "offset_row_scale": (_OFFSET, LossOptions(scale=_ROW_SCALE)),
    "wide_bf16": (_WIDE, LossOptions(scale=0.7)),
    "wide_bf16_negative": (_WIDE, LossOptions(scale=-1.3)),
    "wide_bf16_row_scale": (_WIDE, LossOptions(scale=_ROW_SCALE)),
    "equal_terms": (_equal_terms(), LossOptions(scale=1 / 0.99)),
    "softcap": (_rows(30.0), LossOptions(softcap=30.0, scale=0.7)),
    "softcap_smoothed": (_OFFSET, dataclasses.replace(_SMOOTHED, softcap=50.0, scale=-0.7)),
    "softcap_row_scale": (_WIDE, dataclasses.replace(_SMOOTHED, softcap=30.0, scale=_ROW_SCALE)),
}


def _check(subject: Subject, name: str, widths: tuple[int, ...]) -> None:
    logits, options = _CASES[name]
    if isinstance(options.scale, Tensor):
        options = dataclasses.replace(options, scale=options.scale.to(subject.device))
    random = torch.Generator().manual_seed(4)
    target = torch.randint(_COLUMNS, (_ROWS,), generator=random)
    grads = OutputGrads(*(torch.randn(_ROWS, generator=random).to(subject.device) for _ in OutputGrads._fields))
    drawn = Drawn(logits.to(subject.device), target.to(subject.device), options, grads)
    check_whole(subject, drawn, run_whole(subject, drawn, widths))


@pytest.mark.parametrize("widths", _WIDTHS, ids=str)
@pytest.mark.parametrize("name", _CASES)
def test_values_and_gradient_are_as_exact_as_without_a_scale(
    subject: Subject, name: str, widths: tuple[int, ...]
) -> None:
    _check(subject, name, widths)


@pytest.mark.parametrize("name", ["offset", "offset_smoothed", "offset_row_scale", "wide_bf16", "wide_bf16_negative"])
def test_a_rounded_z_is_refused(twin: Subject, name: str) -> None:
    wrong = dataclasses.replace(twin, backend=z_rounded_first(twin.backend))
    for widths in _WIDTHS:
        with pytest.raises(AssertionError):
            _check(wrong, name, widths)


def test_equal_terms_do_not_all_round_to_one_side(subject: Subject) -> None:
    columns, distance = 20000, torch.linspace(10.1, 14.9, 8)
    logits = -distance[:, None].repeat(1, columns)
    logits[:, 5] = 0.0
    target = torch.full((8,), 5, device=subject.device)
    loss = subject.loss(logits.to(subject.device), target, scale=0.7)
    expected = torch.log1p((columns - 1) * torch.exp(-0.7 * distance.double()))
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1.5e-7, atol=0)


@pytest.mark.parametrize("scale", [0.7, -0.7])
@pytest.mark.parametrize("block", [0, 4], ids=["whole", "blocks"])
def test_predictions_are_those_of_the_logits(subject: Subject, scale: float, block: int) -> None:
    # Of neighbouring numbers, which are equal once they are multiplied and rounded, one is the largest.
    x = 1.75 + 2.0**-23 * (torch.arange(8)[:, None] + torch.arange(8)).float()
    x = x if scale > 0 else -x
    options = LossOptions(scale=scale, reproducible_tp=block > 0)
    target = torch.zeros(8, dtype=torch.int64, device=subject.device)
    with subject.reproducible_blocks_of(4096):
        got = subject.loss(x.to(subject.device), target, options=options, outputs=("predictions",))
    assert got.predictions.tolist() == [7] * 8


@pytest.mark.parametrize("scale", [1e-37, -1e-25, 1e25, -3e38])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_scales_of_any_size(subject: Subject, scale: float, as_tensor: bool) -> None:
    # Padding and masked columns stay out, whatever they are multiplied by.
    random = torch.Generator().manual_seed(5)
    z = 3.0 * torch.randn(2, 40, generator=random)
    factor = torch.tensor(scale).double()
    x = (z.double() / factor).float()
    x[:, 7] = -torch.inf if scale > 0 else torch.inf
    x[:, 37:] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    target = torch.tensor([3, 30])
    given = torch.full((2,), scale, device=subject.device) if as_tensor else scale
    leaf = x.to(subject.device).requires_grad_()
    got = subject.loss(leaf, target.to(subject.device), scale=given, vocab_size=37, outputs=OUTPUTS)
    z = (x.double() * factor)[:, :37]
    log_p = z.log_softmax(-1)
    expected = -log_p.gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(got.loss.detach().cpu().double(), expected, rtol=1e-6, atol=1e-6)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    torch.testing.assert_close(got.entropy.detach().cpu().double(), entropy, rtol=1e-6, atol=1e-6)
    assert got.predictions.cpu().tolist() == z.argmax(-1).tolist()
    if 1e-30 < abs(scale) < 1e30:
        got.loss.sum().backward()
        slope = (log_p.exp() - torch.nn.functional.one_hot(target, 37)) * factor
        torch.testing.assert_close(leaf.grad[:, :37].cpu().double(), slope, rtol=1e-5, atol=1e-6 * abs(scale))
        assert (leaf.grad[:, 37:] == 0.0).all()


@pytest.mark.parametrize("scale", [2.5, -2.5])
def test_masks_that_overflow_have_no_probability(subject: Subject, scale: float) -> None:
    x = torch.tensor([[1.0, 2.0, 0.0, 0.5]]).repeat(2, 3)
    hidden = torch.finfo(torch.float32).min if scale > 0 else torch.finfo(torch.float32).max
    masked = x.clone()
    masked[:, 4:] = hidden
    target = torch.tensor([1, 2], device=subject.device)
    got = subject.loss(masked.to(subject.device), target, scale=scale, outputs=OUTPUTS)
    short = subject.loss(x[:, :4].to(subject.device), target, scale=scale, outputs=OUTPUTS)
    for value, expected in zip(got, short, strict=True):
        torch.testing.assert_close(value, expected)


def test_a_scale_of_1_in_a_row_changes_no_bit(subject: Subject) -> None:
    # Whatever the other rows have.
    options = dataclasses.replace(_SMOOTHED, softcap=50.0)
    x, target = _WIDE[:4].to(subject.device), torch.arange(4, device=subject.device)
    scale = torch.tensor([1.0, 0.7, 1.0, -2.0], device=subject.device)
    for changed in (options, LossOptions(), dataclasses.replace(options, reproducible_tp=True)):
        plain = subject.loss(x, target, options=changed, outputs=OUTPUTS)
        scaled = subject.loss(x, target, options=dataclasses.replace(changed, scale=scale), outputs=OUTPUTS)
        for value, expected in zip(scaled, plain, strict=True):
            assert torch.equal(value[::2], expected[::2])
