"""What deferred logits answer without being made: questions of shape, products with numbers, largest of each row."""

from __future__ import annotations

import pytest
import torch
from deferred_case import B, Case, V
from torch import Tensor

from megatron_patch.deferred import untouched

QUESTIONS = {
    "shape": lambda x: x.shape,
    "size": lambda x: x.size(-1),
    "dim": lambda x: (x.dim(), x.ndim, len(x), x.numel(), torch.numel(x)),
    "dtype": lambda x: (x.dtype, x.is_floating_point(), x.element_size()),
    "device": lambda x: (x.device, x.is_cuda, x.layout),
    "requires_grad": lambda x: x.requires_grad,
    "strides": lambda x: (x.stride(), x.is_contiguous()),
    "kind": lambda x: (isinstance(x, Tensor), torch.is_tensor(x)),
    "in a set": lambda x: x in {x},
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_questions_of_shape_do_not_make_the_logits(question):
    case = Case()
    assert question(case.logits) == question(case.compute())
    assert case.made == 1  # ours
    assert untouched(case.logits)
    case.logits.sum()
    assert not untouched(case.logits)
    assert question(case.logits) == question(case.compute())


MAXIMA = {
    "max": lambda x: x.max(dim=-1),
    "max of position": lambda x: torch.max(x, 2),
    "argmax": lambda x: (x.argmax(-1),),
    "torch.argmax": lambda x: (torch.argmax(x, dim=2),),
}


@pytest.mark.parametrize("maximum", MAXIMA.values(), ids=MAXIMA)
@pytest.mark.parametrize("elements", [2 * B * V, 2**25], ids=["in parts", "at once"])
def test_maxima_do_not_make_the_logits(maximum, elements, monkeypatch):
    """Of scaled logits too; part by part, never more than so many elements at once."""
    monkeypatch.setattr("megatron_patch.maxima.ELEMENTS", elements)
    case = Case(bias=True)
    for logits, factor in ((case.logits, 1.0), (case.logits * -2.0, -2.0)):
        with torch.no_grad():
            case.largest = 0
            found = maximum(logits)
            assert case.largest <= elements
            expected = maximum(case.compute() * factor)
        assert type(found) is type(expected)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert untouched(logits)


def test_maxima_that_are_something_else():
    case = Case()
    assert case.logits.max(dim=-1).values.requires_grad  # a gradient is wanted
    assert not untouched(case.logits)
    for other in (
        lambda x: x.max(),
        lambda x: x.max(dim=1).values,
        lambda x: x.argmax(),
        lambda x: x.argmax(-1, keepdim=True),
        lambda x: torch.max(x, torch.zeros(V)),
        lambda x: torch.max(x, dim=-1, keepdim=True).indices,
    ):
        with torch.no_grad():
            torch.testing.assert_close(other(Case().logits), other(case.compute()))


def test_times_a_number_stays_deferred():
    case = Case()
    for scaled, factor in ((case.logits * 0.5, 0.5), (3 * case.logits, 3.0), ((case.logits * 2) * -0.25, -0.5)):
        assert untouched(scaled)
        assert scaled.origin.scale == factor
    assert case.made == 0
    case.logits.sum()
    assert untouched(case.logits * 0.5)  # looked into before, which changes nothing
    case.logits.add_(1.0)
    assert type(case.logits * 0.5) is Tensor
    for factor in (True, float("nan"), float("inf"), 0, torch.tensor(2.0)):
        assert type(Case().logits * factor) is Tensor
