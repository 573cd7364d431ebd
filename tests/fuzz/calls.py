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
from tests.fuzz.judge import Expected, check_reduced, counted
from tests.fuzz.layouts import LAYOUTS, STRIDES, lay_out, lay_out_logits, view
from tests.fuzz.shards import check_values
from tests.fuzz.upstream import as_output, backward, differentiable, named, used
from tests.fuzz.values import Batch, Example, batch
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(Example):
    """One call.

    Attributes:
        layout: of the logits in memory.
        target_layout, upstream_layout: those of target and gradients.
        graph: what else is done with the logits.
    """

    columns: int
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
        example = self.example
        return as_output(
            self.subject.loss(logits, self.target, options=options, outputs=example.outputs, inplace=example.inplace)
        )

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
        loss = grads.loss.double() / counted(self.drawn.target, self.options)
        return grads._replace(loss=loss.expand(self.drawn.target.shape))

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
        graphs: dict[str, Callable[[OutputGrads, Expected], tuple[LossOutput, Tensor | None]]] = {
            "another loss": self.another_loss,
            "another use": self.another_use,
            "retained": self.retained,
        }
        values, grad = graphs.get(self.example.graph, self.alone)(grads, expected)
        self.check_values(values, truth)
        if grad is None:
            assert all(each is None for each in grads), "no gradient arrived"
        else:
            expected.check(grad)

    # Each returns the values, and the gradient that arrived at the leaf, if any.

    def alone(self, grads: OutputGrads, _: Expected) -> tuple[LossOutput, Tensor | None]:
        graph = self.example.graph
        leaf = self.leaf()
        logits = leaf if graph == "leaf" else view(leaf)
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
        return values, leaf.grad

    def another_loss(self, grads: OutputGrads, expected: Expected) -> tuple[LossOutput, Tensor | None]:
        """With other options; where one overwrites what the other needs, backward raises."""
        leaf = self.leaf()
        logits = view(leaf)
        other = dataclasses.replace(self.options, label_smoothing=0.25, smoothing="uniform")
        first, second = self.forward(logits), self.forward(logits, other)
        del logits
        tensors, upstream = differentiable(first, grads)
        others, other_upstream = differentiable(second, grads)
        if not tensors:
            return first, None
        if self.example.inplace is True:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward([*tensors, *others], [*upstream, *other_upstream])
            leaf.grad = None
            again = view(leaf)
            first = self.forward(again)
            del again
            backward(first, grads)
            return first, leaf.grad
        torch.autograd.backward([*tensors, *others], [*upstream, *other_upstream])
        expected.add(self.drawn.target, other, self.of_rows(grads))
        return first, leaf.grad

    def another_use(self, grads: OutputGrads, _: Expected) -> tuple[LossOutput, Tensor | None]:
        """Their own values are saved by it, and used after the loss has had its backward."""
        leaf = self.leaf()
        logits = view(leaf)
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
        return values, leaf.grad

    def retained(self, grads: OutputGrads, _: Expected) -> tuple[LossOutput, Tensor | None]:
        """Two backwards; the first gradient stays as it is. With inplace=True the second one raises."""
        leaf = self.leaf()
        logits = view(leaf)
        values = self.forward(logits)
        del logits
        tensors, upstream = differentiable(values, grads)
        if not tensors:
            return values, None
        torch.autograd.backward(tensors, upstream, retain_graph=True)
        first = leaf.grad.clone()
        if self.example.inplace is True:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(tensors, upstream)
            leaf.grad = first
            return values, first
        held = leaf.grad
        leaf.grad = None
        torch.autograd.backward(tensors, upstream)
        assert same_bits(held, first)
        assert same_bits(leaf.grad, first)
        return values, first

    def leaf(self) -> Tensor:
        """Of the drawn layout, in memory of its own."""
        return lay_out_logits(self.example.layout, self.source.clone()).detach().requires_grad_()

    def _tuple(self, logits: Tensor) -> tuple[Tensor, ...]:
        values = self.forward(logits)
        return tuple(value for value in values if value is not None)

    def check_values(self, values: LossOutput, truth: Any) -> None:
        """Of every row; the loss, where it is reduced, as the sum of its rows'."""
        got = named(values)
        if self.options.reduction != "none":
            plain = dataclasses.replace(self.options, reduction="none")
            with torch.no_grad():
                rows = self.subject.loss(self.source.detach(), self.target, options=plain, inplace=False)
            check_reduced(got["loss"], rows.double().cpu(), counted(self.drawn.target, self.options), 1e-6)
            got["loss"] = rows
        check_values(got, got, truth, self.drawn.target, self.options)

    def check_unchanged(self, tensor: Tensor) -> None:
        assert same_bits(tensor.detach().contiguous(), self.source.detach().contiguous()), "logits were changed"
