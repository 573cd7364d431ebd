"""How rows lie in memory: read in place whatever the strides of the leading dimensions.

A kernel finds row i at (i // inner) * stride_outer + (i % inner) * stride_inner, one `inner` for every tensor of the
launch. That covers one row dimension, [s, b] and its transpose. Leading dimensions that do not fold into two are
walked from outside, one launch per index, instead of being copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowGrid(NamedTuple):
    """Rows folded into at most two dimensions.

    Attributes:
        inner: size of the inner row dimension; 1 where one dimension is enough.
        strides: (stride_outer, stride_inner) of each tensor, in elements.
        flat_strides: the same in one tuple.
    """

    inner: int
    strides: tuple[tuple[int, int], ...]
    flat_strides: tuple[int, ...]


class RowCut(NamedTuple):
    """Rows [first, first + n_rows) of a call: every tensor's `tensor[place]`, and how they fold."""

    place: tuple[int, ...]
    first: int
    n_rows: int
    grid: RowGrid


def fold_rows(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> RowGrid | None:
    """Fold the row dimensions that all tensors step through alike; None if more than two remain.

    Args:
        shape: sizes of the row dimensions.
        strides: of each tensor, the strides of these dimensions.
    """
    sizes: list[int] = []
    folded: list[list[int]] = []
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            continue
        step = [tensor[dim] for tensor in strides]
        if sizes and step == [inner * sizes[-1] for inner in folded[-1]]:
            sizes[-1] *= shape[dim]
        else:
            sizes.append(shape[dim])
            folded.append(step)
    # `sizes` and `folded` run from the innermost dimension outwards.
    if len(sizes) > 2:
        return None
    outer = folded[-1] if sizes else [0] * len(strides)
    inner = folded[0] if len(sizes) == 2 else [0] * len(strides)
    steps = tuple(zip(outer, inner, strict=True))
    return RowGrid(sizes[0] if len(sizes) == 2 else 1, steps, tuple(step for pair in steps for step in pair))


def cut_rows(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], place: tuple[int, ...] = (), first: int = 0
) -> list[RowCut]:
    """Cut a call into the fewest parts whose rows fold: one, unless three or more row dimensions resist.

    Args:
        shape: sizes of the row dimensions.
        strides: of each tensor, the strides of these dimensions.
        place, first: where these rows lie in the call.
    """
    grid = fold_rows(shape, strides)
    if grid is not None:
        return [RowCut(place, first, math.prod(shape), grid)]
    count = math.prod(shape[1:])
    inner = tuple(tensor[1:] for tensor in strides)
    return [
        cut for outer in range(shape[0]) for cut in cut_rows(shape[1:], inner, (*place, outer), first + outer * count)
    ]


def row_slices(shape: Sequence[int], limit: int, first: int = 0) -> Iterator[tuple[slice, tuple[int | slice, ...]]]:
    """Cut rows into slices of at most `limit` (at least one row) that are basic-indexing views of any layout.

    Yields:
        the flat range of the rows, and the index that selects them from a tensor whose leading dimensions are `shape`.
    """
    if not shape:
        yield slice(first, first + 1), ()
        return
    count = math.prod(shape[1:])
    if count > limit:
        for index in range(shape[0]):
            for rows, rest in row_slices(shape[1:], limit, first + index * count):
                yield rows, (index, *rest)
        return
    step = max(1, limit // max(1, count))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        yield slice(first + start * count, first + stop * count), (slice(start, stop),)


def readable_in_place(logits: Tensor) -> bool:
    """Whether a kernel can read `logits` where they lie: columns are neighbours, and memory holds the values."""
    return (logits.shape[-1] <= 1 or logits.stride(-1) == 1) and not logits.is_neg()


def readable(tensor: Tensor) -> Tensor:
    """`tensor` with its values in strided memory: itself, unless it is sparse, lazily negated or a symbolic zero."""
    if tensor.layout != torch.strided:
        return tensor.to_dense()
    if tensor.is_neg() or tensor._is_zerotensor():
        return tensor.clone().resolve_neg()
    return tensor


def may_share_memory(tensor: Tensor) -> bool:
    """Whether two elements of `tensor` may be one memory location (expanded or overlapping rows).

    Conservative: layouts that interleave without overlapping in a way that no sort of strides shows count as sharing.
    """
    if tensor.numel() == 0:
        return False
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < extent:
            return True
        extent += (size - 1) * stride
    return False
