"""Inputs of the linear loss, its truth in float64, and the check of everything that comes out of it.

Hidden states, weight and bias are small multiples of powers of two: their products and sums are exact in float32, in
whatever order. So the one rounding of the logits to the dtype is known, and their values and the loss are held to the
bounds of the loss on logits. Of the gradients, G is rounded once to the dtype and so are the products made of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import te_ce.linear.chunks
from te_ce import LossOptions, LossOutput, linear_cross_entropy
from te_ce.outputs import OUTPUTS, OutputGrads
from tests.support.bounds import check_predictions, check_value
from tests.support.dense import Dense, dense
from tests.support.subject import Subject

INPUTS = ("hidden", "weight", "bias")

# Relative error of one rounding: at most half a unit in the last place. In float32 and float64 that of the softmax.
_TOLERANCES = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


class Inputs(NamedTuple):
    """hidden [.., H], weight [V, H], bias [V] or None, target [..], options, upstream gradients [..]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    options: LossOptions
    grads: OutputGrads

    def leaves(self, *without: str) -> Inputs:
        """The same with hidden, weight and bias as leaves that require a gradient, but for the names `without`."""
        return self._replace(
            **{
                name: None if value is None else value.detach().clone().requires_grad_(name not in without)
                for name, value in zip(INPUTS, self[:3], strict=True)
            }
        )

    def grad_leaves(self) -> list[Tensor]:
        """Those that require a gradient, in the order of `INPUTS`."""
        return [each for each in self[:3] if each is not None and each.requires_grad]


@dataclasses.dataclass(frozen=True)
class LinearCase:
    """A batch, and how it is cut.

    Attributes:
        chunk_columns: columns of a chunk of the vocabulary; 37 columns make ragged ones.
        chunk_tokens: tokens of a chunk where they have weights.
        budget_chunks: `keep` is the budget of so many chunks of the logits; None: `keep`.
    """

    name: str
    options: LossOptions = dataclasses.field(default_factory=LossOptions)
    dtype: torch.dtype = torch.float32
    keep: Any = "recompute"
    has_bias: bool = True
    has_row_scale: bool = False
    rows: tuple[int, ...] = (2, 3)
    hidden_size: int = 12
    columns: int = 37
    chunk_columns: int = 15
    chunk_tokens: int = 4
    budget_chunks: int | None = None

    def __str__(self) -> str:
        return self.name

    def draw(self, device: torch.device, dtype: torch.dtype | None = None) -> Inputs:
        """The same on every call; some rows are ignored, the first is not."""
        random = torch.Generator().manual_seed(31)
        dtype = self.dtype if dtype is None else dtype

        def multiples(*shape: int, of: float, spread: float) -> Tensor:
            return ((torch.randn(*shape, generator=random) * spread / of).round() * of).to(dtype).to(device)

        hidden = multiples(*self.rows, self.hidden_size, of=2.0**-4, spread=1.0)
        weight = multiples(self.columns, self.hidden_size, of=2.0**-5, spread=0.5)
        bias = multiples(self.columns, of=0.25, spread=1.0) if self.has_bias else None
        classes = self.columns if self.options.vocab_size is None else self.options.vocab_size
        target = torch.randint(classes, self.rows, generator=random)
        target[torch.rand(self.rows, generator=random) < 0.25] = self.options.ignore_index
        target.view(-1)[:2] = torch.tensor([classes - 1, self.options.ignore_index])
        options = self.options
        if self.has_row_scale:
            scale = torch.rand(self.rows, generator=random) + 0.5
            scale.view(-1)[::3] *= -1
            options = dataclasses.replace(options, scale=scale.to(device))
        of_values = torch.float64 if dtype == torch.float64 else torch.float32
        grads = (torch.randn(self.rows, generator=random).to(device, of_values) for _ in OutputGrads._fields)
        return Inputs(hidden, weight, bias, target.to(device), options, OutputGrads(*grads))

    @contextlib.contextmanager
    def cut(self) -> Iterator[Any]:
        """Within: chunks are those of this case. Gives the `keep` to call with."""
        with (
            cut_into(self.chunk_columns, self.chunk_tokens),
            mock.patch.object(te_ce.linear.chunks, "SMALLEST_BUDGET", 1),
        ):
            keep = self.keep
            if self.budget_chunks is not None:
                # A byte more is not one chunk more.
                keep = self.budget_chunks * chunk_bytes(self.rows, self.dtype) + 1
            yield keep


def chunk_bytes(rows: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a chunk of at most 256 columns."""
    return torch.Size(rows).numel() * 256 * torch.empty(0, dtype=dtype).element_size()


@contextlib.contextmanager
def cut_into(columns: int | None = None, tokens: int | None = None) -> Iterator[None]:
    """Within: chunks of so many columns, and of so many tokens where they have weights."""
    given = {"TE_CE_CHUNK_COLUMNS": columns, "TE_CE_CHUNK_TOKENS": tokens}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in given.items() if value is not None}):
        yield


class Result(NamedTuple):
    """Loss and outputs by name, and the gradients by the name of the input."""

    values: dict[str, Tensor]
    grads: dict[str, Tensor]


def call(subject: Subject, inputs: Inputs, **keywords: Any) -> Any:
    """The public function, served by this backend."""
    hidden, weight, bias, target, options, _ = inputs
    keywords = {"bias": bias, "options": options, **keywords}
    with subject.serving():
        return linear_cross_entropy(hidden, weight, target, **keywords)


def run(subject: Subject, inputs: Inputs, outputs: tuple[str, ...] = OUTPUTS, **keywords: Any) -> Result:
    """Values with every one of `outputs`, and the gradients under the upstream ones that `inputs` has."""
    inputs = inputs.leaves()
    got = call(subject, inputs, outputs=outputs, **keywords)
    got = got if isinstance(got, LossOutput) else LossOutput(got)
    values = {name: value for name, value in got._asdict().items() if value is not None}
    used = [(values[name], g) for name, g in inputs.grads._asdict().items() if g is not None]
    with subject.serving():
        torch.autograd.backward([value for value, _ in used], [g.expand(value.shape) for value, g in used])
    return Result(
        values, {name: value.grad for name, value in zip(INPUTS, inputs[:3], strict=True) if value is not None}
    )


class Truth(NamedTuple):
    """Of the rounded logits, in float64.

    Attributes:
        rows: values of the rows and the gradient G of the logits.
        grads: of the inputs, by name.
        sizes: of the errors of `grads` where all of G, and they themselves, are wrong by a part of 1, independently.
    """

    rows: Dense
    grads: dict[str, Tensor]
    sizes: dict[str, float]


def truth_of(inputs: Inputs, grads: OutputGrads | None = None) -> Truth:
    """hidden weight^T + bias in float64, rounded once to the dtype with slope 1, then `tests.support.dense`.

    Args:
        grads: upstream; None: those of `inputs`.
    """
    hidden, weight = (each.detach().cpu().double() for each in inputs[:2])
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logits = hidden @ weight.t()
    if inputs.bias is not None:
        logits = logits + inputs.bias.detach().cpu().double()
    logits = logits.to(inputs.hidden.dtype).double()
    rows = dense(logits, inputs.target, inputs.options, inputs.grads if grads is None else grads)
    # Without products with what is outside the vocabulary: rows of padding may hold anything.
    g, classes = rows.grad, rows.z.shape[1]
    of_weight = torch.zeros_like(weight)
    of_weight[:classes] = g[:, :classes].t() @ hidden
    of_inputs = {"hidden": g[:, :classes] @ weight[:classes], "weight": of_weight, "bias": g.sum(0)}
    squares = {
        "hidden": g[:, :classes] ** 2 @ weight[:classes] ** 2,
        "weight": (g**2).t() @ hidden**2,
        "bias": (g**2).sum(0),
    }
    sizes = {
        name: float((square.nansum() + (of_inputs[name] ** 2).nansum()) ** 0.5) for name, square in squares.items()
    }
    return Truth(rows, of_inputs, sizes)


def check(subject: Subject, inputs: Inputs, result: Result, truth: Truth | None = None) -> None:
    """All values within the bounds of the loss on logits, and all gradients within their tolerance."""
    truth = truth_of(inputs) if truth is None else truth
    check_values(inputs, result.values, truth)
    check_gradients(subject, inputs, result.grads, truth)


def check_values(inputs: Inputs, values: dict[str, Tensor], truth: Truth) -> None:
    """Of every row, within the bounds of the loss on logits."""
    for name, value in values.items():
        assert value.shape == inputs.target.shape, name
        if name == "predictions":
            check_predictions(value, truth.rows, inputs.options)
        else:
            assert value.dtype == torch.promote_types(inputs.hidden.dtype, torch.float32), name
            check_value(name, value, truth.rows, inputs.target, inputs.options)


def check_gradients(subject: Subject, inputs: Inputs, got: dict[str, Tensor], truth: Truth) -> None:
    """Shape, dtype and 2-norm of each gradient; padding rows are exactly 0."""
    given = [name for name, value in zip(INPUTS, inputs[:3], strict=True) if value is not None]
    assert list(got) == given
    for name, value in zip(INPUTS, inputs[:3], strict=True):
        if value is None:
            continue
        grad = got[name]
        assert grad is not None, f"{name}: no gradient"
        assert (grad.shape, grad.dtype) == (value.shape, value.dtype), name
        check_norm(name, grad, truth.grads[name], tolerance(subject, value.dtype) * truth.sizes[name])
        if name != "hidden" and inputs.options.vocab_size is not None:
            assert (grad[inputs.options.vocab_size :] == 0).all(), f"{name}: padding rows are not exactly 0"


def tolerance(subject: Subject, dtype: torch.dtype) -> float:
    """Relative error of a rounding in the 2-norm; more where the interpreter truncates."""
    return _TOLERANCES[dtype] * (1.75 if subject.allowed_ulps(dtype) > 0.5 else 1)


def check_norm(name: str, got: Tensor, truth: Tensor, allowed: float) -> None:
    """The 2-norm of the error is at most `allowed`; NaN exactly where the truth has one."""
    got, truth = got.detach().cpu().double().reshape(-1), truth.reshape(-1)
    assert torch.equal(got.isnan(), truth.isnan()), f"{name}: NaN where the reference has none, or the other way round"
    error = float((got - truth).nan_to_num(0.0).norm())
    assert error <= allowed + 1e-30, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
