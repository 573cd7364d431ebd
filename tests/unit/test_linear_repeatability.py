"""The linear loss: same bits on every run, every buffer written, no host synchronisation, no aliased arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_ce import LossOptions
from te_ce.outputs import OUTPUTS
from tests.support.linear import INPUTS, LinearCase, call, run
from tests.support.no_sync import NoHostSync
from tests.support.subject import Subject, forget_launches

_CASE = LinearCase(
    "all",
    LossOptions(label_smoothing=0.1, z_loss_weight=0.1, vocab_size=33),
    torch.bfloat16,
    keep=0.5,
    chunk_columns=16,
)


def _weighted(subject: Subject) -> list[torch.Tensor]:
    inputs = _CASE.draw(subject.device).leaves()
    weights = torch.linspace(-1, 1, 6, device=subject.device).view(2, 3)
    options = LossOptions(label_smoothing=0.1, vocab_size=33, reduction="mean")
    with _CASE.cut(), subject.serving():
        got = call(subject, inputs, token_weights=weights, options=options, outputs=OUTPUTS)
        got.loss.backward()
    return [*(value.detach() for value in got), *(leaf.grad for leaf in inputs[:3])]


def _unweighted(subject: Subject) -> list[torch.Tensor]:
    with _CASE.cut() as keep:
        result = run(subject, _CASE.draw(subject.device), keep=keep)
    return [*(value.detach() for value in result.values.values()), *(result.grads[name] for name in INPUTS)]


@pytest.mark.parametrize("step", [_unweighted, _weighted])
@pytest.mark.usefixtures("poisoned")
def test_same_bits_on_every_run(subject: Subject, step: Any) -> None:
    first = step(subject)
    assert all(each.isfinite().all() for each in first)
    for _ in range(19 if "interpreter" not in subject.name else 1):
        assert all(torch.equal(one, other) for one, other in zip(first, step(subject), strict=True))


@pytest.mark.parametrize("step", [_unweighted, _weighted])
def test_nothing_waits_for_the_device(subject: Subject, step: Any) -> None:
    expected = step(subject)
    with NoHostSync():
        results = step(subject)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_the_sync_detector_detects() -> None:
    with pytest.raises(AssertionError, match="host synchronisation"), NoHostSync():
        torch.ones(1).item()


@pytest.mark.parametrize("step", [_unweighted, _weighted])
def test_kernel_arguments_are_distinct_tensors(subject: Subject, step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the gradient, which takes over the logits' chunk."""
    if not subject.name.startswith("triton"):
        assert subject.backend.name == "torch"
        return
    from te_ce.kernels import launch, launch_gradient, launch_linear

    places = {
        "row_statistics_kernel": launch,
        "merge_statistics_kernel": launch,
        "row_loss_kernel": launch,
        "logits_gradient_kernel": launch_gradient,
        "scaled_copy_kernel": launch_linear,
    }
    launches: set[str] = set()
    forget_launches(monkeypatch)

    def spy(name: str, launcher: Any) -> None:
        kernel = getattr(launcher, name)

        class Spy:
            def __getitem__(self, grid):  # type: ignore[no-untyped-def]
                def run(*args, **kwargs):  # type: ignore[no-untyped-def]
                    addresses = [arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
                    shared = len(addresses) - len(set(addresses))
                    assert shared == (1 if name == "logits_gradient_kernel" else 0), f"{name}: one tensor for two"
                    launches.add(name)
                    return kernel[grid](*args, **kwargs)

                return run

        monkeypatch.setattr(launcher, name, Spy())

    for name, launcher in places.items():
        spy(name, launcher)
    step(subject)
    of_weighted = {"row_loss_kernel", "logits_gradient_kernel", "scaled_copy_kernel"}
    of_others = {"row_statistics_kernel", "merge_statistics_kernel", "logits_gradient_kernel"}
    assert launches == (of_weighted if step is _weighted else of_others)
