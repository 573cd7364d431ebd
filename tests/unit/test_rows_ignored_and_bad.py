"""Ignored rows, targets that are no class, and the reductions over what is left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from te_ce import LossOptions
from tests.support.subject import Subject


def _logits(subject: Subject, rows: int = 4, columns: int = 6) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=random).to(subject.device)


@pytest.mark.parametrize("alpha", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_reductions_count_the_valid_rows_only(subject: Subject, alpha: float, reduction: str) -> None:
    logits = _logits(subject).requires_grad_()
    target = torch.tensor([0, -100, 5, -100], device=subject.device)
    loss = subject.loss(logits, target, label_smoothing=alpha, reduction=reduction)
    x = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(x, target, label_smoothing=alpha, reduction=reduction)
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=0)
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(logits.grad.double(), x.grad, atol=1e-6, rtol=0)
    if reduction == "none":
        assert (loss[target == -100] == 0).all()


def test_value_of_a_smoothed_mean(subject: Subject) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 6).double().to(subject.device).float()
    target = torch.tensor([0, -100, 5, -100], device=subject.device)
    assert abs(subject.loss(logits, target, label_smoothing=0.2, reduction="mean").item() - 2.065866) < 1e-5


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_all_rows_ignored_is_zero(subject: Subject, reduction: str) -> None:
    logits = _logits(subject).requires_grad_()
    target = torch.full((4,), -100, device=subject.device)
    loss = subject.loss(logits, target, reduction=reduction, label_smoothing=0.1)
    assert loss.shape == ((4,) if reduction == "none" else ())
    assert (loss == 0).all()
    loss.sum().backward()
    assert (logits.grad == 0).all()


def test_a_fully_masked_step_moves_no_parameter(subject: Subject) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(3, 6).to(subject.device)
    before = [parameter.clone() for parameter in head.parameters()]
    target = torch.full((4,), -100, device=subject.device)
    loss = subject.loss(head(torch.randn(4, 3, device=subject.device)), target, reduction="sum")
    (loss / torch.zeros((), device=subject.device).clamp(min=1)).backward()
    torch.optim.SGD(head.parameters(), lr=1.0).step()
    assert all(torch.equal(old, new) for old, new in zip(before, head.parameters(), strict=True))


@pytest.mark.parametrize("filler", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_ignored_rows_are_zero_whatever_they_hold(subject: Subject, filler: float, alpha: float) -> None:
    logits = _logits(subject)
    logits[1] = filler
    logits[3, 2] = filler
    logits.requires_grad_()
    target = torch.tensor([0, -100, 5, -100], device=subject.device)
    loss = subject.loss(logits, target, label_smoothing=alpha, reduction="mean")
    loss.backward()
    assert loss.isfinite()
    assert (logits.grad[[1, 3]] == 0).all()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("ignore_index", [0, 3, 5, -1, 2**40])
def test_any_integer_can_be_ignored(subject: Subject, ignore_index: int) -> None:
    logits = _logits(subject).requires_grad_()
    target = torch.tensor([0, ignore_index, 5, 3], device=subject.device)
    loss = subject.loss(logits, target, ignore_index=ignore_index)
    loss.sum().backward()
    ignored = target == ignore_index
    assert (loss[ignored] == 0).all()
    assert (logits.grad[ignored] == 0).all()
    expected = F.cross_entropy(logits.detach()[~ignored], target[~ignored], reduction="none")
    torch.testing.assert_close(loss[~ignored], expected, atol=1e-6, rtol=0)


# V = 8 over two shards: past the end, in the next rank's padding, negative, and around the limits of the types.
@pytest.mark.parametrize("bad", [8, 15, -1, -5, -(2**31), 2**31 - 1, 2**31, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_a_bad_target_makes_its_row_nan_and_no_other(subject: Subject, bad: int, alpha: float) -> None:
    logits = _logits(subject, 3, 8)
    good = torch.tensor([1, 4, 7], device=subject.device)
    target = good.clone()
    target[1] = bad
    options = LossOptions(label_smoothing=alpha)
    g = torch.ones(3, device=subject.device)
    losses, grad = subject.run_shards(logits, target, g, options, (4, 4))
    right, right_grad = subject.run_shards(logits, good, g, options, (4, 4))
    for loss, expected in zip(losses, right, strict=True):
        assert loss[1].isnan()
        assert torch.equal(loss[[0, 2]], expected[[0, 2]])
    assert grad[1].isnan().all()
    assert torch.equal(grad[[0, 2]], right_grad[[0, 2]])


@pytest.mark.parametrize("bad", [-100, -1, 8, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_no_target_reads_or_writes_outside_its_row(subject: Subject, bad: int, overwrite: bool) -> None:
    bigger = torch.full((5, 24), torch.nan, device=subject.device)
    bigger[1:4, 8:16] = _logits(subject, 3, 8)
    outside = torch.ones_like(bigger, dtype=torch.bool)
    outside[1:4, 8:16] = False
    logits = bigger[1:4, 8:16].requires_grad_()
    target = torch.tensor([1, bad, 7], device=subject.device)
    loss = subject.loss(logits, target, inplace=overwrite)
    loss.sum().backward()
    assert loss[[0, 2]].isfinite().all()
    assert logits.grad[[0, 2]].isfinite().all()
    assert bigger[outside].isnan().all()


def test_padding_ids_are_bad_targets(subject: Subject) -> None:
    target = torch.tensor([0, 4, 5, 3], device=subject.device)
    loss = subject.loss(_logits(subject), target, vocab_size=4)
    assert loss.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("how", ["option", "environment"])
@pytest.mark.parametrize("bad", [6, -1, 2**40])
def test_checking_names_rank_row_and_value(
    subject: Subject, bad: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = torch.tensor([0, -100, bad, bad], device=subject.device)
    keywords = {"check_targets": True} if how == "option" else {}
    if how == "environment":
        monkeypatch.setenv("TE_CE_CHECK_TARGETS", "1")
    with pytest.raises(IndexError, match=rf"rank 0 has 2 bad row.*row 2 with target {bad}: expected"):
        subject.loss(_logits(subject), target, **keywords)
    good = torch.tensor([0, -100, 5, 3], device=subject.device)
    assert subject.loss(_logits(subject), good, **keywords).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ignore_index", [2**32 + 1, -(2**32) + 2, 2**40])
def test_the_mean_counts_in_64_bits(subject: Subject, dtype: torch.dtype, ignore_index: int) -> None:
    target = torch.tensor([1, 2, 3, 4], dtype=dtype, device=subject.device)
    logits = _logits(subject)
    mean = subject.loss(logits, target, ignore_index=ignore_index, reduction="mean")
    torch.testing.assert_close(mean, F.cross_entropy(logits, target.long()), atol=1e-6, rtol=0)
