"""Known values of softcap, scale, z-loss, entropy and lse, and the inputs that broke other losses that have them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_ce import LossOptions, vocab_parallel_log_probs
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.bounds import check_gradient, check_value
from tests.support.dense import dense
from tests.support.subject import Subject
from tests.support.whole import Drawn, check_whole, run_whole

_EVERYTHING = ("loss", "log_probs", "entropy", "lse")


def _drawn(subject: Subject, rows: list[list[float]], target: list[int], options: LossOptions) -> Drawn:
    """These rows, with other upstream gradients for each row and output."""
    logits = torch.tensor(rows).to(subject.device)
    count = torch.arange(1.0, len(target) + 1, device=subject.device)
    grads = OutputGrads(count, 0.5 - count, count * 0.7, count - 3.3)
    return Drawn(logits, torch.tensor(target, device=subject.device), options, grads)


@pytest.mark.parametrize("smoothing", ["uniform", "others"])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_the_reference_agrees_with_torch(alpha: float, smoothing: str) -> None:
    """The truth of all other tests, from functions that it does not use."""
    random = torch.Generator().manual_seed(2)
    x = torch.randn(6, 10, generator=random).double()
    y = torch.randint(10, (6,), generator=random)
    y[2] = -100
    options = LossOptions(label_smoothing=alpha, smoothing=smoothing, z_loss_weight=0.1, softcap=2.0, scale=0.5)  # type: ignore[arg-type]
    got = dense(x, y, options, torch.ones(6))
    kept = y != -100
    z = 0.5 * 2.0 * torch.tanh(x / 2.0)
    spread = torch.distributions.Categorical(logits=z, validate_args=False)
    q = F.one_hot(y.clamp(min=0), 10).double()
    q = q * (1 - alpha) + (alpha / 10 if smoothing == "uniform" else alpha / 9 * (1 - q))
    lse = z.exp().sum(-1).log()
    ce = F.cross_entropy(z, q, reduction="none")
    expected = {"log_probs": spread.log_prob(y.clamp(min=0)), "entropy": spread.entropy(), "lse": lse}
    expected |= {"z_loss": 0.1 * lse**2, "loss": ce + 0.1 * lse**2}
    for name, value in expected.items():
        torch.testing.assert_close(getattr(got, name), torch.where(kept, value, 0.0), msg=name)


@pytest.mark.parametrize("columns", [1000, 130, 3])
def test_padding_lanes_are_masked_after_the_softcap(subject: Subject, columns: int) -> None:
    """A lane at -inf, capped to a finite value, would count."""
    logits = torch.full((2, columns), -50.0, device=subject.device)
    target = torch.tensor([0, columns - 1], device=subject.device)
    for options in (LossOptions(softcap=1.0), LossOptions(softcap=1.0, scale=-3.0), LossOptions(scale=-1.0)):
        got = subject.loss(logits, target, options=options, outputs=OUTPUTS)
        assert (got.loss - math.log(columns)).abs().max() < 1e-5
        assert (got.entropy - math.log(columns)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "options", [LossOptions(softcap=1.0), LossOptions(scale=-2.0), LossOptions(softcap=0.5, scale=-0.5)]
)
@pytest.mark.parametrize("widths", [(12,), (6, 6), (5, 0, 7)], ids=str)
def test_padding_columns_are_masked_after_all_transforms(
    subject: Subject, options: LossOptions, widths: tuple[int, ...]
) -> None:
    rows = [[-50.0] * 7 + [math.inf, -math.inf, math.nan, 1e30, -1e30], [0.0, 1, 2, 3, 4, 5, 6, 1e4, 0, -1e4, 0, 0]]
    drawn = _drawn(subject, rows, [6, 0], dataclasses.replace(options, vocab_size=7))
    results = run_whole(subject, drawn, widths)
    check_whole(subject, drawn._replace(logits=torch.where(torch.arange(12) < 7, drawn.logits.cpu(), 0.0)), results)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_one_temperature_for_all(subject: Subject, as_tensor: bool) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=subject.device, requires_grad=True)
    before = logits.detach().clone()
    target = torch.tensor([1], device=subject.device)
    scale = torch.tensor([2.0], device=subject.device) if as_tensor else 2.0
    got = subject.loss(logits, target, scale=scale, outputs=OUTPUTS)
    torch.testing.assert_close(got.loss.cpu(), torch.tensor([2.145078]), atol=1e-5, rtol=0)
    assert abs(got.entropy.item() - 0.455429) < 1e-5
    assert torch.equal(got.log_probs, -got.loss)
    (grad,) = torch.autograd.grad(got.loss, logits, torch.ones_like(got.loss))
    torch.testing.assert_close(grad.cpu(), torch.tensor([[1.730, -1.766, 0.032, 0.004]]), atol=1e-3, rtol=0)
    with subject.serving():
        log_probs, entropy = vocab_parallel_log_probs(logits, target, scale=scale, entropy=True)
    assert torch.equal(log_probs, got.log_probs)
    assert torch.equal(entropy, got.entropy)
    assert abs(subject.loss(logits, target, outputs=["entropy"]).entropy.item() - 0.947537) < 1e-5
    assert torch.equal(logits, before)


_MASKED = [
    [-math.inf] * 4 + [1.0, 2, 3, 4],
    [1.0, 2, 3, 4] + [-math.inf] * 4,
    [-math.inf, 1.0, -math.inf, 2.0, -math.inf, 3.0, -math.inf, 4.0],
    [-math.inf] * 3 + [7.0] + [-math.inf] * 4,
]


@pytest.mark.parametrize("widths", [(8,), (4, 4), (3, 0, 5), (1,) * 8], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        LossOptions(),
        LossOptions(scale=1.5),
        LossOptions(z_loss_weight=0.1),
        LossOptions(softcap=2.0),
        LossOptions(softcap=2.0, scale=-1.0),
        LossOptions(label_smoothing=0.1),
        LossOptions(label_smoothing=0.1, softcap=2.0, z_loss_weight=0.1),
    ],
    ids=lambda options: f"{options.scale}-{options.softcap}-{options.z_loss_weight}-{options.label_smoothing}",
)
def test_masked_columns_have_no_part_in_any_output(
    subject: Subject, options: LossOptions, widths: tuple[int, ...]
) -> None:
    drawn = _drawn(subject, _MASKED, [6, 1, 3, 3], options)
    results = run_whole(subject, drawn, widths)
    check_whole(subject, drawn, results)
    grad = torch.cat([result.grad for result in results], -1)
    assert grad.isfinite().all()
    assert all(result.values["entropy"].isfinite().all() for result in results)
    if not options.label_smoothing:
        assert (grad[drawn.logits == -math.inf] == 0).all()


def test_one_finite_logit_has_no_entropy(subject: Subject) -> None:
    for place in range(8):
        logits = torch.full((1, 8), -math.inf, device=subject.device)
        logits[0, place] = 4.0
        logits.requires_grad_()
        got = subject.loss(logits, torch.tensor([place], device=subject.device), outputs=OUTPUTS)
        assert [getattr(got, name).item() for name in _EVERYTHING] == [0.0, 0.0, 0.0, 4.0]
        (got.loss + got.entropy + got.log_probs).sum().backward()
        assert (logits.grad == 0).all()


@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_special_values_stay_in_their_row(subject: Subject, filler: float, softcap: float | None) -> None:
    rows = [[1.0, 2, 3, 4, 5, 6], [0.0, filler, 1, 0, 2, 0], [filler] * 6, [3.0, 1, 4, 1, 5, 9]]
    drawn = _drawn(subject, rows, [1, 0, 2, 3], LossOptions(softcap=softcap, z_loss_weight=0.1))
    for widths in [(6,), (1, 2, 3)]:
        check_whole(subject, drawn, run_whole(subject, drawn, widths))


@pytest.mark.parametrize("offset", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("widths", [(3,), (1, 1, 1)], ids=str)
def test_common_offsets_cost_no_precision(subject: Subject, offset: float, widths: tuple[int, ...]) -> None:
    rows = [[2.0 + offset, -1.0 + offset, 0.5 + offset], [offset] * 3]
    drawn = _drawn(subject, rows, [0, 2], LossOptions())
    results = run_whole(subject, drawn, widths)
    check_whole(subject, drawn, results)
    for name in ("entropy", "log_probs"):
        assert abs(abs(results[0].values[name][1].item()) - math.log(3)) < 1e-6


def test_uniform_rows_have_the_largest_entropy(subject: Subject) -> None:
    """Its gradient is 0 there, and every term of it cancels."""
    for columns in (2, 100, 5000):
        logits = torch.full((2, columns), 3.0, device=subject.device, requires_grad=True)
        got = subject.loss(logits, torch.zeros(2, dtype=torch.int64, device=subject.device), outputs=["entropy"])
        assert (got.entropy - math.log(columns)).abs().max() < 2e-6
        got.entropy.sum().backward()
        assert logits.grad.abs().max() < 1e-6 / columns


def test_tanh_does_not_overflow(subject: Subject) -> None:
    rows = [[3e38, -3e38, 0.0, 1.0], [1e4, 1e4, -1e4, 0.0], [1e-30, -1e-30, 0.0, 1e-38]]
    drawn = _drawn(subject, rows, [0, 1, 2], LossOptions(softcap=30.0))
    check_whole(subject, drawn, run_whole(subject, drawn, (4,)))
    drawn = drawn._replace(options=LossOptions(softcap=1e-3, scale=1e4))
    check_whole(subject, drawn, run_whole(subject, drawn, (2, 2)))


def test_a_wide_softcap_changes_little(subject: Subject) -> None:
    """cap tanh(x / cap) of a small x keeps its relative precision."""
    random = torch.Generator().manual_seed(4)
    x = torch.randn(3, 20, generator=random).to(subject.device)
    target = torch.tensor([0, 5, 19], device=subject.device)
    options = LossOptions(softcap=1e4)
    got = subject.loss(x, target, options=options)
    torch.testing.assert_close(got, subject.loss(x, target), atol=2e-3, rtol=0)
    check_value("loss", got, dense(x, target, options, torch.ones(3)), target, options)


def test_an_entropy_bonus_of_a_confident_row(subject: Subject) -> None:
    """A policy that has collapsed: the gradient of the entropy stays exact as p goes to 1."""
    for margin in (5.0, 10.0, 20.0, 60.0):
        x = torch.zeros(1, 50)
        x[0, 7] = margin
        leaf = x.to(subject.device).requires_grad_()
        target = torch.tensor([7], device=subject.device)
        got = subject.loss(leaf, target, outputs=["entropy"])
        grads = OutputGrads(None, entropy=torch.ones(1))
        got.entropy.sum().backward()
        truth = dense(x, target, LossOptions(), grads)
        grad: Tensor = leaf.grad  # type: ignore[assignment]
        check_gradient(grad, truth, x, target, LossOptions(), grads, 0.5)
        check_value("entropy", got.entropy, truth, target, LossOptions())
