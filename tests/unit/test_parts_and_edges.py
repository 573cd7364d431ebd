"""Rows that are read in parts, and rows that begin or end inside a vector of 16 bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions
from tests.support.bounds import check_gradient, check_loss
from tests.support.cases import CASES, Case
from tests.support.dense import dense
from tests.support.subject import Subject

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_IN_PARTS = [case for case in CASES if sum(case.widths) >= 48 and case.rows == (2, 5)]


@pytest.mark.parametrize("case", _IN_PARTS, ids=str)
def test_parts_change_nothing(subject: Subject, case: Case) -> None:
    logits, target, g = case.draw(subject.device)
    truth = dense(logits, target, case.options, g)
    # 96 columns in 4 parts on one rank; ranks that hold less leave parts empty.
    with subject.reading_in_parts_of(48):
        losses, grad = subject.run_shards(logits, target, g, case.options, case.widths)
        for loss in losses:
            assert torch.equal(loss, losses[0])
        check_loss(losses[0], truth)
        ulps = subject.allowed_ulps(case.dtype)
        check_gradient(grad, truth, logits, target, case.options, g, ulps)
        if len(case.widths) == 1:
            assert torch.equal(subject.loss(logits, target, options=case.options), losses[0])


def test_every_rank_reads_in_as_many_parts(subject: Subject) -> None:
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 7000, generator=random).to(subject.device)
    target = torch.randint(7000, (6,), generator=random).to(subject.device)
    g = torch.ones(6, device=subject.device)
    options = LossOptions(label_smoothing=0.1)
    truth = dense(logits, target, options, g)
    # 2334 columns a rank, in 3 parts; the shards hold more, nothing, and less.
    with subject.reading_in_parts_of(2000):
        losses, grad = subject.run_shards(logits, target, g, options, (5001, 0, 1999))
    check_loss(losses[0], truth)
    check_gradient(grad, truth, logits, target, options, g, 0.5)


def _amid_nan(rows: int, columns: int, stride: int, offset: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random rows of `columns`, `stride` apart from element `offset` on, and the storage, NaN everywhere else."""
    storage = torch.full((offset + rows * stride + 16,), torch.nan, dtype=dtype)
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(offset)) * 3
    rows_view = storage[offset:].as_strided((rows, columns), (stride, 1))
    rows_view.copy_(values.to(dtype))
    return rows_view, storage


# Less than a vector, whole vectors, a part of one more, a line and more, one block and a little; every place in a
# vector for bfloat16, whose vectors are the longest, and a few for the others.
_PLACES = [(torch.bfloat16, offset, columns) for offset in range(8) for columns in (1, 7, 9, 16, 33, 300)]
_PLACES += [(torch.bfloat16, offset, columns) for offset in (0, 3, 77) for columns in (2, 8, 15, 2047, 4099)]
_PLACES += [(torch.float32, offset, columns) for offset in (0, 1, 3, 30) for columns in (1, 3, 5, 64, 1025)]
_PLACES += [(torch.float16, offset, columns) for offset in (0, 5) for columns in (7, 129)]


@pytest.mark.parametrize(("dtype", "offset", "columns"), _PLACES, ids=str)
def test_rows_anywhere_in_a_vector(subject: Subject, dtype: torch.dtype, offset: int, columns: int) -> None:
    rows = 3
    view, storage = _amid_nan(rows, columns, columns + 3, offset, dtype)
    storage = storage.to(subject.device)
    logits = storage[offset:].as_strided(view.shape, view.stride())
    before, inputs = storage.clone(), logits.clone()
    target = torch.tensor([0, columns - 1, columns // 2], device=subject.device)
    g = torch.tensor([1.0, -2.0, 0.5], device=subject.device)
    options = LossOptions(label_smoothing=0.1 if offset % 2 else 0.0)
    truth = dense(inputs, target, options, g)
    ulps = subject.allowed_ulps(dtype)

    # The gradient's rows lie elsewhere in their vectors than the logits' rows.
    leaf = logits.detach().requires_grad_()
    loss = subject.loss(leaf, target, options=options, inplace=False)
    check_loss(loss.detach(), truth)
    (grad,) = torch.autograd.grad(loss, leaf, g)
    check_gradient(grad, truth, inputs, target, options, g, ulps)

    with subject.reading_in_parts_of(512):
        check_loss(subject.loss(logits, target, options=options), truth)

    leaf = logits.detach().requires_grad_()
    subject.loss(leaf, target, options=options, inplace=True).backward(g)
    check_gradient(logits, truth, inputs, target, options, g, ulps)
    logits.copy_(inputs)
    assert torch.equal(storage.nan_to_num(7.0), before.nan_to_num(7.0)), "wrote outside of its rows"


@pytest.mark.parametrize("columns", [40, 41, 47, 48])
@pytest.mark.parametrize("classes", [33, 39, 40])
def test_padding_that_begins_inside_a_vector(subject: Subject, columns: int, classes: int) -> None:
    random = torch.Generator().manual_seed(classes)
    logits = torch.randn(4, columns, generator=random).bfloat16().to(subject.device)
    logits[:, classes:] = torch.nan
    target = torch.tensor([0, classes - 1, classes // 2, -100], device=subject.device)
    g = torch.ones(4, device=subject.device)
    options = LossOptions(vocab_size=classes, label_smoothing=0.1)
    losses, grad = subject.run_shards(logits, target, g, options, (columns,))
    truth = dense(logits.nan_to_num(0.0), target, options, g)
    check_loss(losses[0], truth)
    check_gradient(grad, truth, logits.nan_to_num(0.0), target, options, g, subject.allowed_ulps(torch.bfloat16))
    assert (grad[:, classes:] == 0).all()


@pytest.mark.parametrize("columns", [64, 67])
def test_ignored_rows_are_not_read_in_backward(subject: Subject, columns: int) -> None:
    logits = torch.full((2, columns), torch.nan, device=subject.device)
    target = torch.full((2,), -100, device=subject.device)
    loss = subject.loss(logits.requires_grad_(), target)
    assert (loss == 0).all()
    loss.sum().backward()
    assert (logits.grad == 0).all()
