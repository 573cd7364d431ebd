"""torch.compile of functions that contain the loss: eager's numbers, one graph.

In a process of their own: after some of them torch goes on evaluating the interpreter's frames, and no other test there
could see the gradient take over the logits (see te_ce/ownership.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, library

from te_ce import LossOptions, LossOutput, VocabShard, counters, vocab_parallel_cross_entropy


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # The tracing, not a C++ compiler, is what is tested here.
    compiled: Callable[..., Tensor] = torch.compile(function, backend="aot_eager", fullgraph=True)
    return compiled


def _inputs(dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (2, 5)) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(*rows, 24, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(24, 40, generator=random).to(dtype).requires_grad_()
    target = torch.randint(30, rows, generator=random)
    target.view(-1)[1] = -100
    return hidden, weight, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"label_smoothing": 0.1, "smoothing": "others", "vocab_size": 33},
        {"reduction": "mean"},
        {"reduction": "sum", "ignore_index": 7},
        {"options": LossOptions(label_smoothing=0.2, reduction="mean")},
        {"shard": VocabShard(0, 40, 40), "inplace": False},
        {"check_targets": True},
    ],
    ids=str,
)
def test_one_graph_with_the_numbers_of_eager(keywords: dict[str, Any], dtype: torch.dtype) -> None:
    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(hidden @ weight * 2, target, **keywords)

    results = []
    before = sum(counters.served().values())
    for function in (step, _compiled(step)):
        hidden, weight, target = _inputs(dtype)
        loss = function(hidden, weight, target)
        loss.backward(torch.linspace(-1, 1, loss.numel(), dtype=loss.dtype).view(loss.shape))
        results.append((loss.detach(), hidden.grad, weight.grad))
    assert sum(counters.served().values()) == before + 2
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0, equal_nan=True)


def test_other_numbers_of_rows_need_no_other_program() -> None:
    compiled = torch.compile(vocab_parallel_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (4, 7, 9):
        hidden, weight, target = _inputs(rows=(rows, 3))
        logits = (hidden @ weight).detach()
        assert torch.equal(compiled(logits, target), vocab_parallel_cross_entropy(logits, target))


def test_logits_that_the_caller_drops_are_not_overwritten_in_a_graph() -> None:
    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight
        return vocab_parallel_cross_entropy(logits, target), logits

    hidden, weight, target = _inputs()
    loss, logits = torch.compile(step, backend="aot_eager", fullgraph=True)(hidden, weight, target)
    loss.sum().backward()
    assert torch.equal(logits, hidden @ weight)


def test_kept_logits_are_kept_after_a_broken_graph() -> None:
    hidden, weight, target = _inputs()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        _compiled(vocab_parallel_cross_entropy)((hidden @ weight).detach().requires_grad_(), target, inplace=True)
    for _ in range(50):
        logits = hidden @ weight
        before = logits.detach().clone()
        vocab_parallel_cross_entropy(logits, target).sum().backward()
        assert torch.equal(logits, before)


# torch's own look at the logits, where it leaves the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_in_place_breaks_the_graph_and_is_right() -> None:
    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(hidden @ weight, target, inplace=True)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        _compiled(step)(*_inputs())
    hidden, weight, target = _inputs()
    torch.compile(step, backend="aot_eager")(hidden, weight, target).sum().backward()
    expected, weight, target = _inputs()
    step(expected, weight, target).sum().backward()
    assert torch.equal(hidden.grad, expected.grad)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"alpha": 0.1}, TypeError, "unexpected keyword 'alpha'"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing: expected a number in"),
        ({"label_smoothing": "0.1"}, TypeError, "label_smoothing: expected a number, got str"),
        ({"reduction": "avg"}, ValueError, "reduction: expected one of none, sum, mean, got 'avg'"),
        ({"check_targets": 1}, TypeError, "check_targets: expected a bool"),
        ({"ignore_index": True}, TypeError, "ignore_index: expected an int, got bool"),
        ({"vocab_size": 41}, ValueError, "vocab_size: expected at most the 40 columns"),
        ({"inplace": "maybe"}, ValueError, "inplace: expected"),
        ({"shard": VocabShard(0, 20, 40)}, ValueError, "shard: expected logits with"),
    ],
    ids=str,
)
# torch's own, about the functions that it then traces one by one on the way to the error.
@pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning")
def test_errors_are_those_of_eager(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    hidden, weight, target = _inputs()
    logits = (hidden @ weight).detach()
    with pytest.raises(error, match=message):
        vocab_parallel_cross_entropy(logits, target, **keywords)
    with pytest.raises(error, match=message):
        torch.compile(vocab_parallel_cross_entropy, backend="aot_eager")(logits, target, **keywords)
    torch._dynamo.reset()
    # Where there is no eager to fall back to, torch names the error in its own.
    with pytest.raises((error, torch._dynamo.exc.Unsupported), match=message):
        _compiled(vocab_parallel_cross_entropy)(logits, target, **keywords)


def test_targets_are_checked_once_and_not_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Tensor] = []
    monkeypatch.setattr("te_ce.call.raise_for_faults", lambda target, *others: checked.append(target))
    hidden, weight, target = _inputs()
    for keywords in ({"check_targets": True}, {}):
        monkeypatch.setenv("TE_CE_CHECK_TARGETS", "0" if keywords else "1")
        logits = (hidden @ weight).detach().requires_grad_()
        loss = _compiled(vocab_parallel_cross_entropy)(logits, target, **keywords)
        assert len(checked) == 1
        loss.sum().backward()
        assert len(checked) == 1
        checked.clear()


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_loss_that_nobody_uses_is_made(needs_grad: bool) -> None:
    # On a group, the other ranks wait for this one's statistics.
    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        vocab_parallel_cross_entropy(hidden @ weight, target, check_targets=True)
        return hidden * 2

    hidden, weight, target = _inputs()
    hidden.requires_grad_(needs_grad)
    before = sum(counters.served().values())
    compiled = _compiled(step)
    compiled(hidden, weight, target)
    assert sum(counters.served().values()) == before + 1
    with pytest.raises(IndexError, match="bad row"):
        compiled(hidden, weight, target + 20)


def test_bad_targets_raise() -> None:
    hidden, weight, target = _inputs()
    with pytest.raises(IndexError, match="rank 0 has 6 bad row"):
        _compiled(vocab_parallel_cross_entropy)((hidden @ weight).detach(), target + 20, check_targets=True)


@pytest.mark.parametrize("outputs", ["", "entropy predictions", "log_probs entropy lse z_loss predictions"])
@pytest.mark.parametrize("has_row_scale", [False, True])
def test_the_operators_keep_torchs_rules(outputs: str, has_row_scale: bool) -> None:
    hidden, weight, target = _inputs(torch.float64)
    logits = (hidden @ weight).detach().requires_grad_()
    row_scale = torch.linspace(0.5, 2.0, target.numel()).view(target.shape) if has_row_scale else None
    options = (-100, 0.1, "uniform", 1e-3, 30.0, 1.0 if has_row_scale else 0.7, None, False, "none", False)
    library.opcheck(torch.ops.te_ce.loss.default, (logits, target, row_scale, *options, outputs, None, None))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_outputs_and_options_in_a_graph(backend: str) -> None:
    hidden, weight, target = _inputs(torch.float32)
    temperature = torch.linspace(0.5, 2.0, target.numel()).view(target.shape)

    def objective(hidden: Tensor, scale: Tensor) -> tuple[Tensor, LossOutput]:
        out = vocab_parallel_cross_entropy(
            hidden @ weight,
            target,
            outputs=("entropy", "predictions", "lse"),
            scale=scale,
            softcap=20.0,
            z_loss_weight=1e-3,
        )
        return out.loss.sum() - 0.1 * out.entropy.sum(), out

    results = []
    for function in (objective, torch.compile(objective, backend=backend, fullgraph=True)):
        x = hidden.detach().clone().requires_grad_()
        total, out = function(x, temperature)
        total.backward()
        results.append((out, x.grad))
    (eager, eager_grad), (compiled, compiled_grad) = results
    assert compiled.log_probs is None
    for name in ("loss", "entropy", "lse", "predictions"):
        torch.testing.assert_close(getattr(compiled, name), getattr(eager, name), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled_grad, eager_grad, rtol=1e-5, atol=1e-6)
