"""Property: one call of the public function, whatever the layout, and whatever the graph around it.

The graph: nothing else, another loss on the same logits, another use of them, two backwards of a retained graph, a
checkpoint, hooks that see logits or saved tensors, a variable that holds them, no gradient at all. Whoever can still
see the logits must find them unchanged, but with inplace=True.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from te_ce import LossOptions, LossOutput
from te_ce.outputs import OutputGrads
from tests.fuzz import strategies as draws
from tests.fuzz.judge import Expected
from tests.fuzz.shards import check_values, used
from tests.fuzz.values import Batch, Values, batch
from tests.support.bits import same_bits
from tests.support.subject import Subject

GRAPHS = (
    "alone",
    "leaf",
    "held",
    "view held",
    "another loss",
    "another use",
    "retained",
    "checkpointed",
    "reentrant checkpoint",
    "saved elsewhere",
    "gradient hook",
    "no gradient",
    "inference",
)
LAYOUTS = ("dense", "long rows", "odd rows", "transposed", "every other row", "strided columns", "one row for all")
STRIDES = ("dense", "transposed", "every other", "expanded")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        layout: of the logits in memory.
        target_layout, upstream_layout: those of target and gradients.
        graph: what else is done with the logits.
    """

    rows: tuple[int, ...]
    columns: int
    dtype: torch.dtype
    values: Values
    options: LossOptions
    outputs: tuple[str, ...]
    without_gradient: frozenset[str]
    layout: str
    target_layout: str
    target_dtype: torch.dtype
    upstream_layout: str
    graph: str
    inplace: Any

    @property
    def is_copied(self) -> bool:
        """Whether the logits cannot be read, or not be overwritten, where they lie."""
        if self.layout == "strided columns":
            return self.columns > 1
        return self.layout == "one row for all" and torch.Size(self.rows).numel() > 1


@st.composite
def call(draw: Any, float64: bool = False, longest: int = draws.LONGEST) -> Call:
    """Any call."""
    (columns,), values = draw(draws.widths(1, longest)), draw(draws.values())
    return Call(
        rows=draw(draws.rows(longest)),
        columns=columns,
        dtype=draw(draws.dtypes(float64)),
        values=values,
        options=draw(draws.options(columns, values, ("none", "sum", "mean"))),
        outputs=draw(draws.outputs()),
        without_gradient=draw(st.frozensets(st.sampled_from(OutputGrads._fields), max_size=2)),
        layout=draw(st.sampled_from(LAYOUTS)),
        target_layout=draw(st.sampled_from(STRIDES)),
        target_dtype=draw(st.sampled_from((torch.int64, torch.int32))),
        upstream_layout=draw(st.sampled_from(STRIDES)),
        graph=draw(st.sampled_from(GRAPHS)),
        inplace=draw(st.sampled_from(("auto", "auto", False, True))),
    )


def check(subject: Subject, example: Call) -> None:
    """Values and gradient within their bounds; logits that somebody sees as they were; errors where there must be."""
    drawn = batch(example.values, example.rows, example.columns, example.dtype, example.options, subject.device)
    run = _Run(subject, example, drawn)
    if example.inplace is True and example.is_copied:
        with pytest.raises(ValueError, match="inplace"):
            run.forward(run.source)
        return
    run.check()


class _Run:
    """One example with its tensors laid out."""

    def __init__(self, subject: Subject, example: Call, drawn: Batch) -> None:
        self.subject, self.example = subject, example
        self.source = lay_out_logits(example.layout, drawn.logits)
        self.target = lay_out(example.target_layout, drawn.target.to(example.target_dtype))
        # With one row, or one target, for all, the others are gone.
        self.drawn = drawn._replace(
            logits=self.source.clone(memory_format=torch.contiguous_format), target=self.target.long().clone()
        )
        self.options = drawn.options
        self.needs_gradient = example.graph not in ("no gradient", "inference")

    def forward(self, logits: Tensor, options: LossOptions | None = None) -> LossOutput:
        """The call, always as an object with the loss."""
        options = self.options if options is None else options
        logits = logits if logits.requires_grad or not self.needs_gradient else logits.detach().requires_grad_()
        result = self.subject.loss(
            logits, self.target, options=options, outputs=self.example.outputs, inplace=self.example.inplace
        )
        return result if isinstance(result, LossOutput) else LossOutput(result)

    def upstream(self) -> OutputGrads:
        """Gradients as they come back, of the loss one number where it is reduced."""
        grads = used(self.drawn.grads, self.example.outputs, self.example.without_gradient)
        if self.options.reduction != "none" and grads.loss is not None:
            first = grads.loss.reshape(-1)
            grads = grads._replace(loss=first[0] if len(first) else first.sum() + 1)
        return OutputGrads(*(None if each is None else lay_out(self.example.upstream_layout, each) for each in grads))

    def of_rows(self, grads: OutputGrads) -> OutputGrads:
        """The same as gradients of every row's loss."""
        if grads.loss is None or self.options.reduction == "none":
            return grads
        count = 1.0
        if self.options.reduction == "mean":
            count = float((self.drawn.target != self.options.ignore_index).sum().clamp(min=1))
        return grads._replace(loss=(grads.loss.double() / count).expand(self.drawn.target.shape))

    def check(self) -> None:
        grads = self.upstream()
        expected = Expected(self.drawn.logits, self.subject.allowed_ulps(self.example.dtype))
        truth = expected.add(self.drawn.target, self.options, self.of_rows(grads))
        if not self.needs_gradient:
            mode = torch.no_grad() if self.example.graph == "no gradient" else torch.inference_mode()
            with mode:
                values = self.forward(self.source)
            assert not values.loss.requires_grad
            self.check_values(values, truth)
            self.check_unchanged(self.source)
            return
        graphs: dict[str, Callable[[OutputGrads, Expected], tuple[LossOutput, Tensor | None, int]]] = {
            "another loss": self.another_loss,
            "another use": self.another_use,
            "retained": self.retained,
        }
        values, grad, times = graphs.get(self.example.graph, self.alone)(grads, expected)
        self.check_values(values, truth)
        if grad is None:
            assert all(each is None for each in grads), "no gradient arrived"
        else:
            expected.check(grad, times)

    # Each returns the values, the gradient that arrived at the leaf, if any, and how often it did.

    def alone(self, grads: OutputGrads, _: Expected) -> tuple[LossOutput, Tensor | None, int]:
        graph = self.example.graph
        leaf = self.leaf()
        logits = leaf if graph == "leaf" else _view(leaf)
        held = {"held": logits, "view held": logits[...]}.get(graph)
        arrived: list[Tensor] = []
        if graph == "gradient hook":
            logits.register_hook(lambda grad: arrived.append(grad.clone()))
        hooks = contextlib.nullcontext()
        if graph == "saved elsewhere":
            hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)  # type: ignore[assignment]
        with hooks:
            if graph in ("checkpointed", "reentrant checkpoint"):
                recomputed = checkpoint(self._tuple, logits, use_reentrant=graph.startswith("reentrant"))
                values = LossOutput(**dict(zip(("loss", *self.example.outputs), recomputed, strict=True)))
            else:
                values = self.forward(logits)
        del logits
        backward(values, grads)
        if held is not None and self.example.inplace is not True:
            self.check_unchanged(held)
        if graph == "leaf" and self.example.inplace is not True:
            self.check_unchanged(leaf)
        if arrived:
            assert same_bits(arrived[0], leaf.grad)
        return values, leaf.grad, 1

    def another_loss(self, grads: OutputGrads, expected: Expected) -> tuple[LossOutput, Tensor | None, int]:
        """With other options; where one overwrites what the other needs, backward raises."""
        leaf = self.leaf()
        logits = _view(leaf)
        other = dataclasses.replace(self.options, label_smoothing=0.25, smoothing="uniform")
        first, second = self.forward(logits), self.forward(logits, other)
        del logits
        tensors, upstream = differentiable(first, grads)
        others, other_upstream = differentiable(second, grads)
        if not tensors:
            return first, None, 1
        if self.example.inplace is True:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward([*tensors, *others], [*upstream, *other_upstream])
            leaf.grad = None
            again = _view(leaf)
            first = self.forward(again)
            del again
            backward(first, grads)
            return first, leaf.grad, 1
        torch.autograd.backward([*tensors, *others], [*upstream, *other_upstream])
        expected.add(self.drawn.target, other, self.of_rows(grads))
        return first, leaf.grad, 1

    def another_use(self, grads: OutputGrads, _: Expected) -> tuple[LossOutput, Tensor | None, int]:
        """Their own values are saved by it, and used after the loss has had its backward."""
        leaf = self.leaf()
        logits = _view(leaf)
        kept = logits * logits
        values = self.forward(logits)
        del logits
        tensors, upstream = differentiable(values, grads)
        if self.example.inplace is True:
            if tensors:
                torch.autograd.backward(tensors, upstream)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    kept.sum().backward()
        elif tensors:
            torch.autograd.backward(tensors, upstream)
            (grad,) = torch.autograd.grad(kept.sum(), leaf, retain_graph=True)
            assert same_bits(grad, self.source + self.source)
        return values, leaf.grad, 1

    def retained(self, grads: OutputGrads, _: Expected) -> tuple[LossOutput, Tensor | None, int]:
        """Two backwards; the first gradient stays as it is. With inplace=True the second one raises."""
        leaf = self.leaf()
        logits = _view(leaf)
        values = self.forward(logits)
        del logits
        tensors, upstream = differentiable(values, grads)
        if not tensors:
            return values, None, 1
        torch.autograd.backward(tensors, upstream, retain_graph=True)
        first = leaf.grad.clone()
        if self.example.inplace is True:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(tensors, upstream)
            leaf.grad = first
            return values, first, 1
        held = leaf.grad
        leaf.grad = None
        torch.autograd.backward(tensors, upstream)
        assert same_bits(held, first)
        assert same_bits(leaf.grad, first)
        return values, first, 1

    def leaf(self) -> Tensor:
        """Of the drawn layout, in memory of its own."""
        return lay_out_logits(self.example.layout, self.source.clone()).detach().requires_grad_()

    def _tuple(self, logits: Tensor) -> tuple[Tensor, ...]:
        values = self.forward(logits)
        return tuple(value for value in values if value is not None)

    def check_values(self, values: LossOutput, truth: Any) -> None:
        """Of every row; the loss, where it is reduced, by its own float64 sum."""
        got = {name: value.detach() for name, value in values._asdict().items() if value is not None}
        if self.options.reduction != "none":
            reduced = got.pop("loss")
            assert reduced.shape == ()
            plain = dataclasses.replace(self.options, reduction="none")
            with torch.no_grad():
                rows = self.subject.loss(self.source.detach(), self.target, options=plain, inplace=False)
            got["loss"] = rows
            total = rows.double().sum()
            if self.options.reduction == "mean":
                total = total / (self.drawn.target != self.options.ignore_index).sum().clamp(min=1)
            size = rows.double().abs().sum() * 1e-6 + 1e-30
            assert same_value(reduced.double(), total, float(size.nan_to_num(0.0)))
        check_values(got, got, truth, self.drawn.target, self.options)

    def check_unchanged(self, tensor: Tensor) -> None:
        assert same_bits(tensor.detach().contiguous(), self.source.detach().contiguous()), "logits were changed"


def same_value(one: Tensor, other: Tensor, within: float) -> bool:
    """Both NaN, the same infinity, or as close."""
    if one.isfinite() and other.isfinite():
        return bool((one - other).abs() <= within)
    largest = torch.finfo(torch.float32).max
    same = bool(one.isnan() and other.isnan()) or bool(one == other)
    return same or bool(one.isinf() and other.abs() > 0.9 * largest)


def differentiable(values: LossOutput, grads: OutputGrads) -> tuple[list[Tensor], list[Tensor]]:
    """What is used, and its gradients."""
    pairs = [(getattr(values, name), grad) for name, grad in grads._asdict().items() if grad is not None]
    return [value for value, _ in pairs], [grad for _, grad in pairs]


def backward(values: LossOutput, grads: OutputGrads) -> None:
    """From all that is used."""
    tensors, upstream = differentiable(values, grads)
    if tensors:
        torch.autograd.backward(tensors, upstream)


class _View(torch.autograd.Function):
    """The same values in another tensor, which is no leaf and shares its memory with nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _copy_with_strides(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _view(leaf: Tensor) -> Tensor:
    result: Tensor = _View.apply(leaf)
    return result


def _copy_with_strides(x: Tensor) -> Tensor:
    """In memory of its own; what was expanded is so no more."""
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def lay_out_logits(layout: str, x: Tensor) -> Tensor:
    """The same values (of one row, where it is one for all) with other strides."""
    *rows, columns = x.shape
    if layout in ("long rows", "odd rows"):
        wide = x.new_full((*rows, columns + (64 if layout == "long rows" else 3)), 7.0)
        begin = 32 if layout == "long rows" else 1
        wide[..., begin : begin + columns] = x
        return wide[..., begin : begin + columns]
    if layout == "transposed" and len(rows) > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every other row" and rows:
        spread = x.new_full((2 * rows[0], *x.shape[1:]), 7.0)
        spread[::2] = x
        return spread[::2]
    if layout == "strided columns":
        spread = x.new_full((*rows, 2 * columns), 7.0)
        spread[..., ::2] = x
        return spread[..., ::2]
    if layout == "one row for all" and x.numel():
        return x.reshape(-1, columns)[0].expand(*rows, columns)
    return x.contiguous()


def lay_out(layout: str, x: Tensor) -> Tensor:
    """The same values (one of them, where they are expanded) with other strides."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every other" and x.dim():
        spread = x.new_full((2 * x.shape[0], *x.shape[1:]), 3)
        spread[::2] = x
        return spread[::2]
    if layout == "expanded" and x.numel():
        return x.reshape(-1)[0].expand(x.shape)
    return x
