"""Strides, offsets past 2^31, many rows, no rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, VocabShard
from te_ce.layout import cut_rows, fold_rows, may_share_memory, readable_in_place, row_slices
from te_ce.problem import ShardProblem
from tests.support.bounds import check_gradient, check_loss
from tests.support.dense import dense
from tests.support.subject import Subject, forget_launches


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(13))


_LAYOUTS = {
    "transposed": lambda: _random(4, 2, 8).transpose(0, 1),
    "every_other_row": lambda: _random(8, 2, 8)[::2],
    "columns_of_wider_rows": lambda: _random(4, 2, 20)[..., 5:13],
    "permuted_three_dims": lambda: _random(2, 3, 4, 8).permute(2, 0, 1, 3),
    "permuted_three_dims_all": lambda: _random(2, 3, 4, 8).permute(2, 1, 0, 3),
    "size_one_dims": lambda: _random(1, 4, 1, 8).transpose(0, 1),
    "columns_not_contiguous": lambda: _random(4, 8, 3).transpose(1, 2),
    "every_other_column": lambda: _random(4, 16)[:, ::2],
    "one_column_of_many": lambda: _random(4, 16)[:, 3:4],
    "expanded": lambda: _random(1, 8).expand(5, 8),
    "negative_offset_view": lambda: _random(6, 8)[2:5],
}


@pytest.mark.parametrize("layout", list(_LAYOUTS))
@pytest.mark.parametrize("target_layout", ["contiguous", "strided"])
def test_any_strides(subject: Subject, layout: str, target_layout: str) -> None:
    logits = _LAYOUTS[layout]().to(subject.device)
    # `.to` keeps strides of dense tensors only; on the CPU it is the view itself.
    columns = logits.shape[-1]
    target = torch.randint(columns, logits.shape[:-1], generator=torch.Generator().manual_seed(1)).to(subject.device)
    if target_layout == "strided":
        target = torch.stack((target, target), -1)[..., 0].transpose(0, -1).contiguous().transpose(0, -1)
    g = _random(*logits.shape[:-1]).to(subject.device)
    truth = dense(logits, target, LossOptions(), g)
    source = logits.detach().requires_grad_()
    loss = subject.loss(source, target)
    assert loss.shape == target.shape
    (grad,) = torch.autograd.grad(loss, source, g)
    assert grad.shape == logits.shape
    check_loss(loss, truth)
    check_gradient(grad, truth, logits, target, LossOptions(), g, 0.5)


def test_strided_rows_are_read_in_place(subject: Subject) -> None:
    logits = _random(4, 2, 8).to(subject.device).transpose(0, 1).requires_grad_()
    loss = subject.loss(logits, torch.zeros(2, 4, dtype=torch.int64, device=subject.device))
    saved = loss.grad_fn.saved_tensors[0]
    assert saved.data_ptr() == logits.data_ptr()
    assert saved.stride() == logits.stride()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_no_rows(subject: Subject, shape: tuple[int, ...], reduction: str) -> None:
    logits = torch.randn(*shape, 8, device=subject.device, requires_grad=True)
    target = torch.zeros(shape, dtype=torch.int64, device=subject.device)
    loss = subject.loss(logits, target, reduction=reduction, label_smoothing=0.1)
    assert loss.shape == (shape if reduction == "none" else ())
    assert (loss == 0).all()
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape


def test_more_rows_than_a_grid_axis_of_65535(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 70_000
    if subject.name == "triton-interpreter":
        # It would take minutes: look at the grids instead, and run the rows on the other subjects.
        assert all(len(grid) == 1 for grid in _grids(subject, rows, monkeypatch))
        return
    logits = torch.zeros(rows, 4, device=subject.device)
    logits[-1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    target = torch.zeros(rows, dtype=torch.int64, device=subject.device)
    logits.requires_grad_()
    loss = subject.loss(logits, target)
    loss.sum().backward()
    expected = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).softmax(-1)[0]
    torch.testing.assert_close(loss[-1].cpu(), -expected[0].log(), atol=1e-6, rtol=0)
    torch.testing.assert_close(logits.grad[-1].cpu(), expected - torch.tensor([1.0, 0, 0, 0]), atol=1e-6, rtol=0)


def _grids(subject: Subject, rows: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Grids of the launches for so many rows, read whole and in parts; nothing is run."""
    from te_ce.kernels import launch, launch_gradient

    grids: list[tuple[int, ...]] = []

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: None

    forget_launches(monkeypatch)
    for name in ("row_loss_kernel", "row_statistics_kernel", "merge_statistics_kernel"):
        monkeypatch.setattr(launch, name, Spy())
    monkeypatch.setattr(launch_gradient, "logits_gradient_kernel", Spy())
    logits = torch.zeros(rows, 4, device=subject.device, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.int64, device=subject.device)
    subject.loss(logits, target).sum().backward()
    assert len(grids) == 2
    with subject.reading_in_parts_of(2):
        subject.loss(logits, target).sum().backward()
    assert len(grids) == 5
    return grids


_FAR_APART = """
import torch
from tests.conftest import make_subject
from te_ce.layout import readable_in_place

subject = make_subject({name!r})
for shape, strides in {layouts}:
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=subject.device)
    logits = storage.as_strided(shape, strides)
    assert readable_in_place(logits)
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(subject.device)
    logits.copy_(values)
    target = torch.arange(values[..., 0].numel(), device=subject.device).view(shape[:-1])
    near = values.clone().requires_grad_()
    subject.loss(near, target).sum().backward()
    with torch.no_grad():
        assert torch.equal(subject.loss(logits, target), subject.loss(values, target))
    loss = subject.loss(logits.requires_grad_(), target, inplace=True)
    assert loss.grad_fn.saved_tensors[0].data_ptr() == storage.data_ptr(), "copied: the test is void"
    loss.sum().backward()
    assert torch.equal(storage.as_strided(shape, strides), near.grad)
print("right")
"""

# Rows 2^30 elements apart; and two row dimensions of which only row (1, 1) passes 2^31.
_LAYOUTS_PAST_2_31 = [((3, 64), (2**30, 1)), ((2, 2, 64), (2**30 + 2**29, 2**29, 1))]


def test_offsets_past_2_31(subject: Subject) -> None:
    # A 32-bit offset ends in a segmentation fault: in a process of its own.
    script = _FAR_APART.format(name=subject.name, layouts=_LAYOUTS_PAST_2_31)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


def test_an_empty_shard_of_one_rank_is_an_error(subject: Subject) -> None:
    target = torch.zeros(3, dtype=torch.int64, device=subject.device)
    with pytest.raises(ValueError, match="logits: expected at least 1 column, got 0"):
        subject.loss(torch.empty(3, 0, device=subject.device), target)
    with pytest.raises(ValueError, match="1 <= size"):
        VocabShard(0, 0, 0)


def test_folding_rows() -> None:
    assert fold_rows((), ((),))[:2] == (1, ((0, 0),))
    assert fold_rows((5,), ((7,),))[:2] == (1, ((7, 0),))
    assert fold_rows((2, 3), ((21, 7),))[:2] == (1, ((7, 0),))
    assert fold_rows((2, 3), ((7, 14),))[:2] == (3, ((7, 14),))
    assert fold_rows((1, 3, 1), ((99, 7, 5),))[:2] == (1, ((7, 0),))
    # Both must fold alike.
    assert fold_rows(
        (2, 3),
        (
            (21, 7),
            (1, 2),
        ),
    ) == (3, ((21, 7), (1, 2)), (21, 7, 1, 2))
    assert fold_rows((2, 3, 4), ((12, 4, 1),))[:2] == (1, ((1, 0),))
    assert fold_rows((2, 3, 4), ((1, 2, 6),)) is None


@pytest.mark.parametrize("permutation", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)])
def test_parts_and_slices_cover_every_row_once(permutation: tuple[int, ...]) -> None:
    ids = torch.arange(24).view(2, 3, 4).permute(permutation).contiguous()
    tensor = ids.permute(sorted(range(3), key=permutation.__getitem__)).clone().permute(permutation)
    flat = tensor.reshape(-1).tolist()
    found: list[int] = []
    for part in cut_rows(tensor.shape, (tensor.stride(),)):
        (outer, inner) = part.grid.strides[0]
        assert part.first == len(found)
        view = tensor[part.place]
        memory = torch.as_strided(view, (24,), (1,), 0).tolist()
        base = view.storage_offset()
        found += [
            memory[base + row // part.grid.inner * outer + row % part.grid.inner * inner] for row in range(part.n_rows)
        ]
    assert found == flat
    for limit in (1, 3, 5, 100):
        rows = [value for _, index in row_slices(tensor.shape, limit) for value in tensor[index].reshape(-1).tolist()]
        assert rows == flat


def test_layout_predicates() -> None:
    base = torch.zeros(4, 6)
    assert readable_in_place(base)
    assert not readable_in_place(base.t())
    assert readable_in_place(base[:, :1])
    assert not may_share_memory(base.t())
    assert not may_share_memory(base[::2, 1:3])
    assert may_share_memory(base[:1].expand(4, 6))
    assert may_share_memory(base.as_strided((3, 4), (2, 1)))
    assert not may_share_memory(torch.empty(0, 3))


@pytest.mark.parametrize("which", ["logits", "target"])
def test_lazily_negated_inputs(subject: Subject, which: str) -> None:
    logits = _random(4, 8).to(subject.device)
    target = torch.tensor([1, 2, 3, 4], device=subject.device)
    if which == "logits":
        assert torch.equal(subject.loss(torch._neg_view(logits), target), subject.loss(-logits, target))
        with pytest.raises(ValueError, match="inplace: expected logits that can be read in place"):
            subject.loss(torch._neg_view(logits), target, inplace=True)
    else:
        assert torch.equal(subject.loss(logits, torch._neg_view(-target)), subject.loss(logits, target))


def test_launches_that_differ_in_addresses_only_are_kept_once(subject: Subject) -> None:
    if not subject.name.startswith("triton"):
        # The twin launches nothing.
        assert subject.backend.name == "torch"
        return
    from te_ce.kernels import launch, plans

    # Three row dimensions that do not fold: one launch for each index of the first.
    logits = torch.zeros(4, 3, 5, 8, device=subject.device).permute(2, 1, 0, 3)
    target = torch.zeros(5, 3, 4, dtype=torch.int64, device=subject.device)
    problem = ShardProblem.resolve(LossOptions(), VocabShard(0, 8, 8))
    strides = logits.stride(), target.stride(), None
    launches = launch._loss_launches(plans.layout_of(logits, target), strides, problem)
    assert [(place, first) for place, first, _ in launches] == [((index,), 12 * index) for index in range(5)]
    assert len({id(how) for _, _, how in launches}) == 1
