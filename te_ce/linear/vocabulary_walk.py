"""Statistics and gradients, one chunk of this rank's vocabulary after the other, all tokens at a time.

Forward makes each chunk of the logits, reads its statistics, and drops or keeps it. Backward, with the statistics of
the whole rows known, makes it again (or takes the kept one), turns it into its gradient in place, adds its part of the
hidden states' gradient to a float32 sum, and writes its rows of the weight's gradient, once.

Walking the tokens instead would add to the whole gradient of the weight with every chunk, of which V_local H is mostly
the larger product; what it is good for, see `te_ce.linear.token_walk`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_ce.collectives import PendingSum, gather_statistics, start_sum
from te_ce.linear.call import LinearCall
from te_ce.linear.chunks import padded_width
from te_ce.linear.products import add_product, logits_into, set_product, sum_dtype
from te_ce.linear.weight_gradient import NewWeightGradient
from te_ce.outputs import OutputGrads


class Batch(NamedTuple):
    """The tensors of a call as the walks read them.

    Attributes:
        hidden: [N, H], of the whole sequence.
        weight: [V_local, H].
        bias: [V_local].
        target, row_scale: [N].
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    row_scale: Tensor | None

    def of_tokens(self, rows: slice) -> Batch:
        """These tokens alone."""
        scale = None if self.row_scale is None else self.row_scale[rows]
        return Batch(self.hidden[rows], self.weight, self.bias, self.target[rows], scale)

    def logits_into(self, out: Tensor, columns: slice) -> None:
        """Logits of these columns of the shard into `out` [N, C]."""
        logits_into(out, self.hidden, self.weight[columns], None if self.bias is None else self.bias[columns])


class Needed(NamedTuple):
    """Whose gradient somebody wants."""

    hidden: bool
    weight: bool
    bias: bool


class _Chunks:
    """Buffers [N, C] of chunks that are not kept: one memory for all of them."""

    def __init__(self, batch: Batch, chunks: tuple[slice, ...]) -> None:
        self._batch = batch
        self._width = padded_width(max((each.stop - each.start for each in chunks), default=0))
        self._memory: Tensor | None = None

    def new(self, columns: slice) -> Tensor:
        """Memory of its own."""
        width = columns.stop - columns.start
        hidden = self._batch.hidden
        return hidden.new_empty((hidden.shape[0], padded_width(width)))[:, :width]

    def scratch(self, columns: slice) -> Tensor:
        """The memory that every call gives."""
        if self._memory is None:
            self._memory = self._batch.hidden.new_empty((self._batch.hidden.shape[0], self._width))
        return self._memory[:, : columns.stop - columns.start]


def statistics(batch: Batch, call: LinearCall, keeps: bool) -> tuple[Tensor, list[Tensor]]:
    """Statistics [parts, fields, N] of this rank's columns, and the logits of the last chunks where any are kept.

    Args:
        keeps: a backward may come.
    """
    chunks, n_kept = call.chunks, call.kept if keeps else 0
    buffers = _Chunks(batch, chunks)
    parts, kept = [], []
    # A rank without columns has the statistics of none of them.
    for number, columns in enumerate(chunks or (slice(0, 0),)):
        is_kept = bool(n_kept) and number >= len(chunks) - n_kept
        logits = buffers.new(columns) if is_kept else buffers.scratch(columns)
        batch.logits_into(logits, columns)
        problem = call.problem.of_columns(columns)
        parts.append(call.backend.row_statistics(logits, batch.target, problem, batch.row_scale))
        if is_kept:
            kept.append(logits)
    return parts[0] if len(parts) == 1 else torch.cat(parts), kept


def row_loss(
    batch: Batch, target: Tensor, call: LinearCall, keeps: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], list[Tensor]]:
    """Loss [..], what is saved of the whole rows, outputs [..], and the kept logits. One all-gather.

    Args:
        target: [..], as the loss is to be shaped.
        keeps: a backward may come.
    """
    parts, kept = statistics(batch, call, keeps)
    if call.group is not None:
        # Ranks may have cut their columns into different numbers of chunks.
        parts = gather_statistics(call.backend.combine_statistics(parts, call.problem, batch.row_scale), call.group)
    row_scale = None if batch.row_scale is None else batch.row_scale.view(target.shape)
    return *call.backend.merge_statistics(parts, target, call.problem, row_scale), kept


def gradients(
    batch: Batch,
    grads: OutputGrads,
    saved: Tensor,
    kept: list[Tensor],
    call: LinearCall,
    needed: Needed,
    overwrites_kept: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden (summed over the group, float32), weight and bias; None where nobody wants it.

    Args:
        grads: [N] each.
        kept: logits of the last chunks, as `row_loss` gave them; lost where `overwrites_kept`.
    """
    chunks, hidden = call.chunks, batch.hidden
    buffers = _Chunks(batch, chunks)
    of_hidden = hidden.new_empty(hidden.shape, dtype=sum_dtype(hidden.dtype)) if needed.hidden else None
    of_weight = None
    if needed.weight:
        make = call.weight_gradient
        of_weight = NewWeightGradient(batch.weight, call.problem.real_columns) if make is None else make()
    of_bias = torch.zeros_like(batch.bias) if needed.bias and batch.bias is not None else None
    pending = None
    for number, columns in enumerate(chunks):
        is_kept = number >= len(chunks) - len(kept)
        logits = kept[number - len(chunks)] if is_kept else buffers.scratch(columns)
        if not is_kept:
            batch.logits_into(logits, columns)
        grad = logits if overwrites_kept or not is_kept else buffers.scratch(columns)
        problem = call.problem.of_columns(columns)
        call.backend.logits_gradient(logits, batch.target, grads, saved, grad, problem, batch.row_scale)
        if of_hidden is not None:
            (add_product if number else set_product)(of_hidden, grad, batch.weight[columns])
        if number == len(chunks) - 1:
            # On its way while the last rows of the weight's gradient are made.
            pending = _start_sum(of_hidden, call)
        if of_weight is not None:
            of_weight.add(columns, grad, hidden)
        if of_bias is not None:
            of_bias[columns] = grad.sum(0, dtype=sum_dtype(grad.dtype))
    if not chunks:
        pending = _start_sum(None if of_hidden is None else of_hidden.zero_(), call)
    return None if pending is None else pending.wait(), None if of_weight is None else of_weight.result(), of_bias


def _start_sum(of_hidden: Tensor | None, call: LinearCall) -> PendingSum | None:
    return None if of_hidden is None else start_sum(of_hidden, call.group, call.sequence_parallel)
