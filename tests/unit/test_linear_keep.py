"""The memory option: which chunks are kept, how many GEMMs that saves, and when kept logits are overwritten."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from te_ce.linear import token_walk, vocabulary_walk, weight_gradient
from te_ce.outputs import OutputGrads
from tests.support.linear import INPUTS, Inputs, Result, call, check_gradients, chunk_bytes, cut_into, run, truth_of
from tests.support.linear_cases import linear_case
from tests.support.subject import Subject

_PLACES = {
    "logits": [(vocabulary_walk, "logits_into")],
    "hidden": [(vocabulary_walk, "set_product"), (vocabulary_walk, "add_product")],
    "weight": [(weight_gradient, "set_product")],
    # Of hidden and of weight.
    "weighted": [(token_walk, "set_product"), (token_walk, "add_product")],
}


@contextlib.contextmanager
def gemms() -> Iterator[Counter[str]]:
    """Counts the GEMMs made within: of the logits, and of whose gradient."""
    counts: Counter[str] = Counter()

    def counted(name: str, product: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            counts[name] += 1
            product(*arguments)

        return run

    with contextlib.ExitStack() as stack:
        for name, places in _PLACES.items():
            for module, function in places:
                stack.enter_context(mock.patch.object(module, function, counted(name, getattr(module, function))))
        yield counts


# 37 columns: chunks of 10, 10, 10 and 7, the last of which are kept.
@pytest.mark.parametrize(
    ("keep", "kept"),
    [("recompute", 0), (0.0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.74, 2), (0.75, 3), (1.0, 4), (1 << 20, 4)],
)
def test_each_kept_chunk_saves_a_gemm(twin: Subject, keep: Any, kept: int) -> None:
    inputs = linear_case("plain").draw(twin.device).leaves()
    with cut_into(10), gemms() as counts:
        loss = call(twin, inputs, keep=keep)
        assert counts == {"logits": 4}
        loss.sum().backward()
    assert counts == {"logits": 8 - kept, "hidden": 4, "weight": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("spare", "kept"), [(-1, 0), (0, 1)])
def test_a_budget_is_in_bytes_of_the_dtype(
    twin: Subject, dtype: torch.dtype, spare: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te_ce.linear.chunks.SMALLEST_BUDGET", 1)
    inputs = linear_case("plain").draw(twin.device, dtype).leaves()
    with cut_into(10), gemms() as counts:
        call(twin, inputs, keep=chunk_bytes((2, 3), dtype) + spare).sum().backward()
    assert counts["logits"] == 8 - kept


@pytest.mark.parametrize("keep", ["recompute", 0.5])
@pytest.mark.parametrize("without", [(), *((name,) for name in INPUTS), INPUTS[:2], INPUTS[1:], ("hidden", "bias")])
def test_what_is_frozen_needs_no_gemm(twin: Subject, without: tuple[str, ...], keep: Any) -> None:
    inputs = linear_case("plain").draw(twin.device).leaves(*without)
    with cut_into(10), gemms() as counts:
        call(twin, inputs, keep=keep).sum().backward()
    wanted = {name: 4 for name in ("hidden", "weight") if name not in without}
    assert counts == {"logits": 8 if keep == "recompute" else 6, **wanted}
    assert [leaf.grad is not None for leaf in inputs[:3]] == [name not in without for name in INPUTS]


@pytest.mark.parametrize("without", [(), ("hidden",), ("weight",), ("hidden", "weight"), INPUTS])
def test_weighted_tokens_take_each_logit_once(twin: Subject, without: tuple[str, ...]) -> None:
    inputs = linear_case("plain").draw(twin.device).leaves(*without)
    weights = torch.ones(2, 3)
    with cut_into(37, 2), gemms() as counts:
        loss = call(twin, inputs, token_weights=weights, reduction="sum", options=None)
        if loss.requires_grad:
            loss.backward()
    wanted = 3 * sum(name not in without for name in ("hidden", "weight"))
    assert counts == {"logits": 3, **({"weighted": wanted} if wanted else {})}


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_nothing_is_kept_or_multiplied_where_no_gradient_is_wanted(twin: Subject, mode: str) -> None:
    inputs = linear_case("plain").draw(twin.device).leaves()
    with (
        cut_into(10),
        gemms() as counts,
        getattr(torch, mode)(),
        mock.patch.object(vocabulary_walk._Chunks, "new") as kept,
    ):
        call(twin, inputs, keep=1.0)
        call(twin, inputs, token_weights=torch.ones(2, 3), reduction="sum", options=None)
    kept.assert_not_called()
    assert set(counts) == {"logits"}


def test_a_gradient_for_one_input_alone(twin: Subject) -> None:
    inputs = linear_case("plain").draw(twin.device).leaves()
    with cut_into(10):
        loss = call(twin, inputs, keep=0.5).sum()
        whole = torch.autograd.grad(loss, inputs[:3], retain_graph=True)
        for place in range(3):
            (grad,) = torch.autograd.grad(loss, inputs[place], retain_graph=True)
            assert torch.equal(grad, whole[place])


@pytest.mark.parametrize("keep", ["recompute", 0.5, 1.0])
def test_a_graph_that_is_kept_gives_the_same_again(subject: Subject, keep: Any) -> None:
    inputs = linear_case("plain_bf16").draw(subject.device).leaves()
    with cut_into(16), subject.serving():
        loss = call(subject, inputs, keep=keep).sum()
        first, again, last = (torch.autograd.grad(loss, inputs[:3], retain_graph=kept) for kept in (True, True, False))
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
        assert all(torch.equal(*pair) for pair in zip(first, last, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, inputs[:3])


@pytest.mark.parametrize("keep", ["recompute", 0.5, 1.0])
@pytest.mark.parametrize("without", [(), ("hidden", "weight"), ("weight", "bias"), ("hidden", "bias")])
def test_the_gradient_cannot_be_differentiated_again(twin: Subject, keep: Any, without: tuple[str, ...]) -> None:
    inputs = linear_case("plain").draw(twin.device).leaves(*without)
    leaves = inputs.grad_leaves()
    with cut_into(16), twin.serving():
        # The second derivative of what is added would hide that the other one is missing.
        loss = call(twin, inputs, keep=keep).sum() + sum((leaf**3).sum() for leaf in leaves)
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated again, which is not supported"):
            torch.autograd.grad(sum(grad.sum() for grad in grads), leaves)


class _Interrupt(BaseException):
    """As a KeyboardInterrupt, which test runners have other uses for."""


def _interrupted_after(subject: Subject, steps: int) -> Subject:
    """A subject whose gradient of the logits is interrupted, once, after so many chunks."""
    left = [steps]

    def gradient(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise _Interrupt
        subject.backend.logits_gradient(*arguments)

    return dataclasses.replace(subject, backend=subject.backend._replace(logits_gradient=gradient))


@pytest.mark.parametrize("hooks", ["none", "same_tensor", "copies"])
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("keep", ["recompute", 0.5, 1.0])
def test_an_interrupted_backward_tried_again_raises_or_is_right(
    twin: Subject, keep: Any, steps: int, hooks: str
) -> None:
    inputs = linear_case("plain").draw(twin.device).leaves()
    packs = {"none": None, "same_tensor": lambda tensor: tensor, "copies": torch.clone}
    hooked: Any = contextlib.nullcontext()
    if packs[hooks] is not None:
        hooked = torch.autograd.graph.saved_tensors_hooks(packs[hooks], lambda tensor: tensor)
    with cut_into(16), hooked:
        loss = call(_interrupted_after(twin, steps), inputs, keep=keep).sum()
    with pytest.raises(_Interrupt):
        loss.backward()
    assert all(leaf.grad is None for leaf in inputs[:3])
    if keep != "recompute":
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|interrupted in backward"):
            loss.backward()
        return
    loss.backward()
    _check_plain(twin, inputs)


def _check_plain(subject: Subject, inputs: Inputs) -> None:
    ones = torch.ones_like(inputs.target, dtype=torch.float32)
    grads = {name: leaf.grad for name, leaf in zip(INPUTS, inputs[:3], strict=True)}
    check_gradients(subject, inputs, grads, truth_of(inputs, OutputGrads(ones)))


@pytest.mark.parametrize("keep", ["recompute", 0.5, 1.0])
@pytest.mark.parametrize("columns", [None, "5", "16"])
def test_chunks_are_those_of_the_call(twin: Subject, keep: Any, columns: str | None) -> None:
    """Not of the environment that backward finds."""
    inputs = linear_case("plain").draw(twin.device).leaves()
    with cut_into(10):
        loss = call(twin, inputs, keep=keep).sum()
    with mock.patch.dict(os.environ, {} if columns is None else {"TE_CE_CHUNK_COLUMNS": columns}):
        loss.backward()
    _check_plain(twin, inputs)


@pytest.mark.parametrize("keep", ["recompute", 0.5])
@pytest.mark.parametrize("name", ["hidden", "weight", "target"])
def test_an_input_changed_before_backward_raises(twin: Subject, name: str, keep: Any) -> None:
    inputs = linear_case("plain").draw(twin.device).leaves()
    with cut_into(10):
        loss = call(twin, inputs, keep=keep).sum()
    changed: Tensor = getattr(inputs, name)
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nobody_gets_the_memory_of_the_kept_logits(twin: Subject) -> None:
    inputs = linear_case("plain").draw(twin.device)
    with cut_into(16):
        first: Result = run(twin, inputs, keep=1.0)
        before = {name: grad.clone() for name, grad in first.grads.items()}
        run(twin, inputs._replace(hidden=inputs.hidden * 2), keep=1.0)
    assert all(torch.equal(first.grads[name], before[name]) for name in INPUTS)


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        (True, TypeError, 'keep: expected "recompute", a float .* got bool'),
        (None, TypeError, "keep: .* got NoneType"),
        (torch.tensor(0.5), TypeError, "keep: .* got Tensor"),
        (0, ValueError, "keep: .* got 0; for a share write 0.0"),
        (1, ValueError, "keep: .* got 1; for a share write 1.0"),
        (5, ValueError, "keep: .* got 5$"),
        ((1 << 20) - 1, ValueError, "keep: .* an int of at least 1048576 bytes, got 1048575"),
        (-5, ValueError, "keep: .* got -5"),
        (-0.1, ValueError, "keep: .* got -0.1"),
        (1.5, ValueError, "keep: .* got 1.5"),
        (float("nan"), ValueError, "keep: .* got nan"),
        (float("inf"), ValueError, "keep: .* got inf"),
        ("x", ValueError, "keep: .* got 'x'"),
        ("", ValueError, "keep: .* got ''"),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_wrong_values(twin: Subject, keep: Any, error: type[Exception], message: str, weighted: bool) -> None:
    inputs = linear_case("plain").draw(twin.device)
    keywords = {"token_weights": torch.ones(2, 3), "reduction": "sum", "options": None} if weighted else {}
    with pytest.raises(error, match=message):
        call(twin, inputs, keep=keep, **keywords)
