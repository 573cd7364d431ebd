"""Property: the linear loss of any layer, cut into any chunks and kept in any way, with weights of the tokens or none.

Hidden states, weight and bias are small multiples of powers of two, so that their products and sums are exact in
float32, in whatever order: see `tests.support.linear`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

import te_ce.linear.chunks
from te_ce.outputs import OutputGrads
from tests.fuzz import strategies as draws
from tests.fuzz.judge import check_reduced, counted
from tests.fuzz.upstream import as_output, backward, named, used
from tests.fuzz.values import Example, make_target, make_upstream
from tests.support import linear
from tests.support.bounds import gradient_bound, unit_in_last_place
from tests.support.linear import Inputs
from tests.support.subject import Subject

KEEPS: tuple[Any, ...] = ("recompute", 0.0, 0.3, 0.5, 1.0, 1, 5000)
_COLUMNS = st.integers(1, 90)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer(Example):
    """A layer, its batch, and how it is cut.

    Attributes:
        keep: what is kept; a number of bytes may be any.
        weighted: whether the tokens have weights, which makes the loss one number.
        frozen: what needs no gradient.
    """

    hidden_size: int
    columns: int
    has_bias: bool
    chunk_columns: int
    chunk_tokens: int
    keep: Any
    weighted: bool
    frozen: frozenset[str]


@st.composite
def layer(draw: Any, float64: bool = False, columns: st.SearchStrategy[int] = _COLUMNS) -> Layer:
    """Any of them, small: its values are drawn by their kind for the target and what comes back alone."""
    width, values = draw(columns), draw(draws.values())
    values = dataclasses.replace(values, logits="normal", upstream=draw(st.sampled_from(("normal", "ones", "zero"))))
    weighted = draw(st.booleans())
    keep = "recompute" if weighted else draw(st.sampled_from(KEEPS))
    return Layer(
        rows=draw(draws.rows(draws.LONGEST)),
        hidden_size=draw(st.integers(1, 33)),
        columns=width,
        dtype=draw(draws.dtypes(float64)),
        values=values,
        options=draw(draws.options(width, values, ("sum", "mean") if weighted else ("none", "sum", "mean"))),
        outputs=draw(draws.outputs()),
        without_gradient=frozenset() if weighted else draw(st.frozensets(st.sampled_from(OutputGrads._fields))),
        has_bias=draw(st.booleans()),
        chunk_columns=draw(st.integers(1, 100)),
        chunk_tokens=draw(st.integers(1, 20)),
        keep=keep,
        weighted=weighted,
        frozen=draw(st.frozensets(st.sampled_from(linear.INPUTS), max_size=1)),
    )


def draw_inputs(example: Layer, device: torch.device) -> tuple[Inputs, Tensor]:
    """The tensors, and a weight for every token."""
    random = torch.Generator().manual_seed(example.values.seed)

    def multiples(*shape: int, of: float, spread: float) -> Tensor:
        return ((torch.randn(*shape, generator=random) * spread / of).round() * of).to(example.dtype).to(device)

    rows, options = example.rows, example.options
    classes = example.columns if options.vocab_size is None else options.vocab_size
    hidden = multiples(*rows, example.hidden_size, of=2.0**-4, spread=1.0)
    weight = multiples(example.columns, example.hidden_size, of=2.0**-5, spread=0.5)
    bias = multiples(example.columns, of=0.25, spread=1.0) if example.has_bias else None
    target = make_target(example.values.target, rows, classes, options.ignore_index, random).to(device)
    if example.values.has_row_scale:
        options = dataclasses.replace(options, scale=(torch.rand(rows, generator=random) + 0.5).to(device))
    of_values = torch.float64 if example.dtype == torch.float64 else torch.float32
    grads = OutputGrads(
        *(make_upstream(example.values.upstream, rows, random).to(device, of_values) for _ in OutputGrads._fields)
    )
    weights = torch.randint(0, 3, rows, generator=random).to(device, torch.float32) / 2
    return Inputs(hidden, weight, bias, target, options, grads), weights


@contextlib.contextmanager
def cut(example: Layer) -> Iterator[None]:
    """Within: chunks are those of the example, and any budget will do."""
    smallest = mock.patch.object(te_ce.linear.chunks, "SMALLEST_BUDGET", 1)
    with linear.cut_into(example.chunk_columns, example.chunk_tokens), smallest:
        yield


def check(subject: Subject, example: Layer) -> None:
    """Loss and outputs as of the rounded logits; the gradients of what needs one."""
    inputs, weights = draw_inputs(example, subject.device)
    leaves = inputs.leaves(*(name for name in example.frozen if name != "bias" or example.has_bias))
    if not example.has_bias:
        leaves = leaves._replace(bias=None)
    keywords: dict[str, Any] = {"keep": example.keep, "outputs": example.outputs}
    if example.weighted:
        keywords["token_weights"] = weights
    with cut(example):
        output = as_output(linear.call(subject, leaves, **keywords))
        grads, of_rows = upstream(example, inputs, weights)
        with subject.serving():
            is_differentiated = backward(output, grads)
    truth, values = linear.truth_of(inputs, of_rows), named(output)
    check_loss(example, inputs, values.pop("loss"), truth.rows.loss, weights)
    linear.check_values(inputs, values, truth)
    if is_differentiated and not overflows(truth, example.dtype):
        ulps = subject.allowed_ulps(example.dtype)
        check_gradients(subject, inputs, leaves, truth, error_of_g(inputs, truth, of_rows, ulps))


def overflows(truth: linear.Truth, dtype: torch.dtype) -> bool:
    """Whether a gradient is beyond what it is stored in: that of the logits, and what is made of it may be anything."""
    gradients = (truth.rows.grad, *truth.grads.values())
    largest = max((float(each.nan_to_num(0.0).abs().amax()) for each in gradients if each.numel()), default=0.0)
    return largest > 0.9 * torch.finfo(dtype).max


def upstream(example: Layer, inputs: Inputs, weights: Tensor) -> tuple[OutputGrads, OutputGrads]:
    """The gradients as they come back, and those of every row's values."""
    grads = used(inputs.grads, () if example.weighted else example.outputs, example.without_gradient)
    if example.options.reduction == "none" or grads.loss is None:
        return grads, grads
    number = inputs.grads.loss.new_tensor(-1.5)  # type: ignore[union-attr]
    factor = number.double().cpu() / counted(inputs.target, inputs.options)
    of_rows = factor * weights.double().cpu() if example.weighted else factor.expand(inputs.target.shape)
    return grads._replace(loss=number), grads._replace(loss=of_rows)


def check_loss(example: Layer, inputs: Inputs, loss: Tensor, rows: Tensor, weights: Tensor) -> None:
    """Of every row within its bound; a sum within what its terms are off by."""
    if example.options.reduction == "none":
        linear.check_values(inputs, {"loss": loss}, linear.truth_of(inputs))
        return
    # A weight of 0 does not make a number of NaN.
    terms = rows * weights.double().cpu().reshape(-1) if example.weighted else rows
    check_reduced(loss, terms, counted(inputs.target, inputs.options), 4e-5)


def error_of_g(inputs: Inputs, truth: linear.Truth, grads: OutputGrads, ulps: float) -> dict[str, float]:
    """2-norms of what the bound on the logits' gradient G allows in those of the inputs, at the worst."""
    bound = gradient_bound(truth.rows, inputs.target, inputs.options, grads).nan_to_num(0.0)
    of_g = truth.rows.grad[:, : bound.shape[1]].nan_to_num(0.0)
    bound = bound + ulps * unit_in_last_place(of_g, inputs.hidden.dtype)
    hidden, weight = (each.detach().cpu().double().abs().reshape(-1, each.shape[-1]) for each in inputs[:2])
    of_inputs = {"hidden": bound @ weight[: bound.shape[1]], "weight": bound.t() @ hidden, "bias": bound.sum(0)}
    return {name: float(each.norm()) for name, each in of_inputs.items()}


def check_gradients(
    subject: Subject, inputs: Inputs, leaves: Inputs, truth: linear.Truth, computed: dict[str, float]
) -> None:
    """Of what needs one; None of the rest."""
    for name, leaf in zip(linear.INPUTS, leaves[:3], strict=True):
        if leaf is None:
            continue
        assert (leaf.grad is not None) == leaf.requires_grad, name
        if leaf.grad is not None:
            allowed = linear.tolerance(subject, leaf.dtype) * truth.sizes[name] + computed[name]
            unit = unit_in_last_place(truth.grads[name].nan_to_num(0.0), leaf.dtype)
            allowed += subject.allowed_ulps(leaf.dtype) * float(unit.norm())
            linear.check_norm(name, leaf.grad, truth.grads[name], allowed)
            if name != "hidden" and inputs.options.vocab_size is not None:
                assert (leaf.grad[inputs.options.vocab_size :] == 0).all(), f"{name}: padding rows are not exactly 0"
