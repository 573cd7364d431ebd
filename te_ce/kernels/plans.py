"""What the launchers share: the launches of a call, one for every part of it whose rows fold, and how rows are aligned.

What a launch is made of besides its tensors depends on their layout and on the problem only, and is kept from call to
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from te_ce.kernels.launcher import Launch
from te_ce.kernels.shapes import LINE_BYTES
from te_ce.layout import RowCut, RowGrid

Strides = tuple[int, ...]


def rows_at(tensor: Tensor, place: tuple[int, ...]) -> Tensor:
    """The rows of `tensor` at the place of a cut."""
    return tensor[place] if place else tensor


def from_row(tensor: Tensor, first: int) -> Tensor:
    """[.., N], contiguous, as the kernels take it: row `first` of the first field is where it begins."""
    return tensor.view(-1)[first:] if first else tensor


class Layout(NamedTuple):
    """What the launches of a call depend on besides strides; `at` counts the bytes from a line to the first tensor."""

    shape: torch.Size  # of the rows
    dtype: torch.dtype  # of the first tensor
    target_dtype: torch.dtype
    device: int
    at: int


def layout_of(tensor: Tensor, target: Tensor) -> Layout:
    """Of a call whose first tensor is `tensor` and whose rows have the shape of `target`."""
    return Layout(target.shape, tensor.dtype, target.dtype, tensor.get_device(), tensor.data_ptr() % LINE_BYTES)


# The launches of a call, mostly one: the place of their rows in the tensors, the number of the first one, the launch.
Launches = tuple[tuple[tuple[int, ...], int, Launch], ...]


def launches_of(cuts: list[RowCut], launch_of: Callable[[RowCut], Launch]) -> Launches:
    """Launches of the cuts that have rows; those that differ in addresses only share one."""
    distinct: dict[object, Launch] = {}
    launches = []
    for cut in cuts:
        if cut.n_rows:
            how = launch_of(cut)
            launches.append((cut.place, cut.first, distinct.setdefault((how.programs, how.sizes, how.constants), how)))
    return tuple(launches)


def line_offset(at: int, cut: RowCut, strides: Strides, dtype: torch.dtype) -> int:
    """Bytes from a line to the rows of `cut`, of a tensor that begins `at` bytes after one."""
    offset = sum(step * stride for step, stride in zip(cut.place, strides, strict=False))
    return (at + offset * dtype.itemsize) % LINE_BYTES


def rows_begin_at(grid: RowGrid, index: int, at: int, dtype: torch.dtype, multiple: int) -> bool:
    """Whether all rows of tensor `index`, which begins `at` bytes after a line, begin at multiples of so many bytes."""
    return at % multiple == 0 and all(step * dtype.itemsize % multiple == 0 for step in grid.strides[index])
