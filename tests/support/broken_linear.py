"""Linear losses that are wrong in their walks, or in a step of them: what the tests must refuse."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from te_ce.backend import Backend
from te_ce.linear import products, token_walk, vocabulary_walk, weight_gradient
from te_ce.linear.weight_gradient import NewWeightGradient
from tests.support.broken import BROKEN, GradientStep, with_gradient
from tests.support.broken_whole import BROKEN_WHOLE
from tests.support.subject import Subject

_Broken = contextlib.AbstractContextManager[Any]


def _in_both_walks(**functions: Callable[..., Any]) -> Callable[[], _Broken]:
    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        with mock.patch.multiple(vocabulary_walk, **functions), mock.patch.multiple(token_walk, **functions):
            yield

    return broken


def _add_nothing(out: Tensor, a: Tensor, b: Tensor) -> None:
    """The products of all chunks but the first are left out."""


def _logits_without_bias(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    products.logits_into(out, hidden, weight, None)


def _last_column_lost(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The last column of each chunk is that of its neighbour."""
    products.logits_into(out, hidden, weight, bias)
    if out.shape[1] > 1:
        out[:, -1] = out[:, -2]


def _logits(logits_into: Callable[..., None]) -> _Broken:
    return mock.patch.object(vocabulary_walk, "logits_into", logits_into)


def logits_rounded_twice() -> _Broken:
    """Wrong in precision only, where the dtype has half of the bits: rounded once more before the bias is added."""

    def logits_into(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        products.logits_into(out, hidden, weight, None)
        if bias is not None:
            out += bias

    return _logits(logits_into)


def sum_rounded_with_every_chunk() -> _Broken:
    """As if sums of products were kept in bfloat16."""

    def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
        products.add_product(out, a, b)
        out.copy_(out.bfloat16())

    return _in_both_walks(add_product=add_product)()


def _rows_shifted() -> _Broken:
    """Each chunk's rows of the weight's gradient go where those of the next one belong."""

    def add(self: NewWeightGradient, rows: slice, grad_logits: Tensor, hidden: Tensor) -> None:
        whole = torch.empty((grad_logits.shape[1], hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
        products.set_product(whole, grad_logits.t(), hidden)
        place = (torch.arange(rows.start, rows.stop, device=hidden.device) + rows.stop - rows.start) % len(self._grad)
        self._grad[place] = whole

    return mock.patch.object(NewWeightGradient, "add", add)


def _weight_rows_of_first_chunk() -> _Broken:
    """The hidden states' gradient is made with the weight's first rows, whatever the chunk."""
    set_product, add_product, first = products.set_product, products.add_product, []

    def remember(out: Tensor, a: Tensor, b: Tensor) -> None:
        first[:] = [b]
        set_product(out, a, b)

    def add(out: Tensor, a: Tensor, b: Tensor) -> None:
        add_product(out, a, first[0][: b.shape[0]])

    return mock.patch.multiple(vocabulary_walk, set_product=remember, add_product=add)


def _weight_gradient_doubled() -> _Broken:
    def double(out: Tensor, a: Tensor, b: Tensor) -> None:
        products.set_product(out, a, b)
        out *= 2

    return mock.patch.object(weight_gradient, "set_product", double)


# Wrong where both walks have at least two chunks, and a bias. Name -> what is broken within.
BROKEN_WALKS: dict[str, Callable[[], _Broken]] = {
    "chunks_skipped": _in_both_walks(add_product=_add_nothing),
    "overwritten_instead_of_added": _in_both_walks(add_product=products.set_product),
    "bias_forgotten": lambda: _logits(_logits_without_bias),
    "last_column_of_a_chunk_lost": lambda: _logits(_last_column_lost),
}
# Of the walk over the vocabulary alone.
BROKEN_VOCABULARY_WALKS: dict[str, Callable[[], _Broken]] = {
    **BROKEN_WALKS,
    "weight_rows_shifted": _rows_shifted,
    "weight_rows_of_the_first_chunk": _weight_rows_of_first_chunk,
    "weight_gradient_doubled": _weight_gradient_doubled,
}


def _gradient_doubled(backend: Backend) -> Backend:
    def gradient(step: GradientStep) -> None:
        backend.logits_gradient(*step)
        step.out.mul_(2)

    return with_gradient(backend, gradient)


# Name -> a subject whose steps are wrong, with the case in which every option is on.
BROKEN_STEPS: dict[str, Callable[[Backend], Backend]] = {
    "gradient_doubled": _gradient_doubled,
    **{name: BROKEN[name] for name in ("off_target_zeroed", "doubled_reduction", "target_shifted")},
    **{name: make for name, (make, _, ranks) in BROKEN_WHOLE.items() if ranks == 1},
}


def broken_subject(subject: Subject, name: str) -> Subject:
    """`subject` with the steps of that name."""
    return dataclasses.replace(subject, backend=BROKEN_STEPS[name](subject.backend))
