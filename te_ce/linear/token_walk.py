"""Loss and gradients in one pass, one chunk of tokens after the other, each with this rank's whole vocabulary.

Where the weight of every token in the final scalar is known beforehand, so is the gradient of the logits up to one
factor, and each chunk of them is made once: three GEMMs instead of four, and no logits kept. The price is that the
gradient of the weight is summed over the chunks in float32, [V_local, H], and that the statistics of every chunk of
tokens need a collective of their own: those of a chunk are wanted before its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_ce.collectives import gather_statistics, start_sum
from te_ce.linear.call import LinearCall
from te_ce.linear.chunks import padded_width
from te_ce.linear.products import add_product, set_product, sum_dtype
from te_ce.linear.vocabulary_walk import Batch, Needed
from te_ce.outputs import OutputGrads


class Gradients(NamedTuple):
    """Gradients of sum(w L) in float32; None where nobody wants it.

    Attributes:
        hidden: [N, H], or [N / W, H] with sequence parallelism; summed over the group.
        weight: [V_local, H].
        bias: [V_local].
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def loss_and_gradients(
    batch: Batch, token_weights: Tensor, call: LinearCall, needed: Needed
) -> tuple[Tensor, tuple[Tensor, ...], Gradients]:
    """Loss [N], outputs [N] each, and the gradients of sum(w L).

    Args:
        token_weights: w [N] float32.
    """
    hidden, real = batch.hidden, slice(0, call.problem.real_columns)
    chunks = call.token_chunks
    sums = _empty_sums(batch, call, needed)
    rows_of_chunk = max((rows.stop - rows.start for rows in chunks), default=0)
    memory = hidden.new_empty((rows_of_chunk, padded_width(real.stop)))[:, real]
    losses, outputs, pending = [], [], None
    # Without tokens, the same steps once, of none.
    for number, rows in enumerate(chunks or (slice(0, 0),)):
        part = batch.of_tokens(rows)
        grad = memory[: rows.stop - rows.start]
        part.logits_into(grad, real)
        loss, others = _gradient_in_place(part, grad, token_weights[rows] if any(needed) else None, call)
        losses.append(loss)
        outputs.append(others)
        if sums.hidden is not None:
            set_product(sums.hidden[rows], grad, batch.weight[real])
            if rows.stop == hidden.shape[0]:
                # On its way while the last part of the weight's gradient is made.
                pending = start_sum(sums.hidden, call.group, call.sequence_parallel)
        if sums.weight is not None:
            (add_product if number else set_product)(sums.weight[real], grad.t(), part.hidden)
        if sums.bias is not None:
            sums.bias[real] += grad.sum(0, dtype=sums.bias.dtype)
    if pending is not None:
        sums = sums._replace(hidden=pending.wait())
    return torch.cat(losses), tuple(torch.cat(each) for each in zip(*outputs, strict=True)), sums


def _gradient_in_place(
    batch: Batch, logits: Tensor, token_weights: Tensor | None, call: LinearCall
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Loss and outputs of some tokens from their `logits` [N, real columns], whose gradient lies there then.

    Args:
        token_weights: None: no gradient is wanted.
    """
    _, _, _, target, row_scale = batch
    backend, problem = call.backend, call.problem
    if call.group is None:
        loss, saved, outputs = backend.row_loss(logits, target, problem, row_scale)
    else:
        gathered = gather_statistics(backend.row_statistics(logits, target, problem, row_scale), call.group)
        loss, saved, outputs = backend.merge_statistics(gathered, target, problem, row_scale)
    if token_weights is not None:
        backend.logits_gradient(logits, target, OutputGrads(token_weights), saved, logits, problem, row_scale)
    return loss, outputs


def _empty_sums(batch: Batch, call: LinearCall, needed: Needed) -> Gradients:
    """Where the gradients go; those of padding are 0 already."""
    hidden, weight, bias = batch.hidden, batch.weight, batch.bias
    dtype = sum_dtype(hidden.dtype)
    of_hidden = of_weight = of_bias = None
    if needed.hidden:
        # A rank without columns adds nothing to the sum over the ranks.
        make = hidden.new_empty if call.problem.real_columns else hidden.new_zeros
        of_hidden = make(hidden.shape, dtype=dtype)
    if needed.weight:
        of_weight = weight.new_empty(weight.shape, dtype=dtype)
        of_weight[call.problem.real_columns :] = 0.0
    if needed.bias and bias is not None:
        of_bias = torch.zeros_like(bias, dtype=dtype)
    return Gradients(of_hidden, of_weight, of_bias)
