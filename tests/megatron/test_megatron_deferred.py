"""Deferred logits: whatever gets hold of them finds the ordinary ones, once, and no gradient is lost on the way."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patch.deferred import DeferredLogits, Origin, plain, untouched
from te_ce import vocab_parallel_cross_entropy

S, B, H, V = 5, 2, 4, 7
TARGET = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(3))


class Case:
    """A layer of its own, the logits that it defers, and how often they were made."""

    def __init__(self, bias=False, frozen=False):
        torch.manual_seed(0)
        self.input = torch.randn(S, B, H, requires_grad=True)
        self.weight = torch.randn(V, H, requires_grad=not frozen)
        self.bias = torch.randn(V, requires_grad=True) if bias else None
        self.hidden = self.input * 1.0  # not a leaf, as in a model
        self.made, self.siblings = 0, weakref.WeakSet()
        self.logits = Origin(None, self.compute, self.hidden, self.weight, self.bias, (S, B, V), self.siblings).defer()

    def compute(self, hidden=None):
        self.made += 1
        return F.linear(self.hidden if hidden is None else hidden, self.weight, self.bias)

    def grads(self, loss):
        leaves = [leaf for leaf in (self.input, self.weight, self.bias) if leaf is not None and leaf.requires_grad]
        return torch.autograd.grad(loss, leaves)


class Square(torch.autograd.Function):
    """Reads its input's values, and saves it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Overwriting(torch.autograd.Function):
    """As Megatron's own loss on float32 logits: it keeps what it needs, and overwrites its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        result = x * x
        x.zero_()
        return result

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Through(torch.autograd.Function):
    """Hands its input on untouched and never looks at it."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class Dirty(torch.autograd.Function):
    """Declares that it changed its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def below_torch_functions(x):
    with torch._C.DisableTorchFunctionSubclass():
        return torch.sigmoid(x)


def in_place(x):
    x.mul_(2.0)
    return Square.apply(x)


def without_grad_first(x):
    with torch.no_grad():
        x.sum()
    return x.tanh()


def written(x):
    x[0, 0, 0] = 1.0
    return x.exp()


USES = {
    "function": lambda x: x.tanh(),
    "torch function": lambda x: F.cross_entropy(x.flatten(0, 1), TARGET.flatten()),
    "method chain": lambda x: (x.float().transpose(0, 1).contiguous() ** 2).sum(-1),
    "operator": lambda x: 1.0 / (x * x + 1.0),
    "concatenated": lambda x: torch.cat([x, x], dim=0).exp(),
    "autograd function": Square.apply,
    "overwriting autograd function": Overwriting.apply,
    "autograd function that hands on": Through.apply,
    "C++": below_torch_functions,
    "te_ce": lambda x: vocab_parallel_cross_entropy(x, TARGET),
    "in place, then an autograd function": in_place,
    "without gradients first": without_grad_first,
    "written into": written,
    "times a number": lambda x: (x * 2.0).tanh(),
    "a number times, twice": lambda x: torch.mul(0.5 * x, 3).tanh(),
    "times 0": lambda x: x * 0,
    "times a tensor": lambda x: x * torch.arange(V),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(("bias", "frozen"), [(False, False), (True, False), (False, True)], ids=["", "bias", "frozen"])
def test_every_use_has_the_ordinary_values_and_gradients(use, bias, frozen):
    case, other = Case(bias, frozen), Case(bias, frozen)
    result, expected = use(case.logits), use(other.compute() * 1.0)
    assert type(result) is Tensor
    assert case.made == 1
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    upstream = torch.arange(1.0, result.numel() + 1).view(result.shape)
    for grad, other_grad in zip(
        case.grads((result * upstream).sum()), other.grads((expected * upstream).sum()), strict=True
    ):
        torch.testing.assert_close(grad, other_grad, rtol=1e-5, atol=1e-5)


def test_used_twice_made_once():
    case, other = Case(), Case()
    logits = other.compute()
    loss = Square.apply(case.logits).sum() + case.logits.sum() + below_torch_functions(case.logits).sum()
    assert case.made == 1
    for grad, expected in zip(
        case.grads(loss), other.grads((logits * logits + logits + logits.sigmoid()).sum()), strict=True
    ):
        torch.testing.assert_close(grad, expected)
    assert case.logits.data_ptr() == plain(case.logits).data_ptr()


def test_double_backward_of_a_kept_graph():
    case = Case()
    loss = Square.apply(case.logits).sum()
    first = torch.autograd.grad(loss, [case.input, case.weight], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, case.grads(loss), strict=True))


def test_a_function_that_changed_it_in_place_is_an_error():
    case = Case()
    changed = Dirty.apply(case.logits)
    assert not untouched(changed)
    with pytest.raises(RuntimeError, match="mark_dirty"):
        changed.sum()
    with pytest.raises(RuntimeError, match="mark_dirty"):
        below_torch_functions(changed)


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
            found, expected = maximum(logits), maximum(case.compute() * factor)
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
    assert type(case.logits * 0.5) is Tensor  # looked into before
    for factor in (True, float("nan"), float("inf"), 0, torch.tensor(2.0)):
        assert type(Case().logits * factor) is Tensor


def test_grad_mode_is_that_of_the_layer():
    with torch.no_grad():
        case = Case()
    assert not case.logits.requires_grad
    assert not plain(case.logits).requires_grad
    case = Case()
    with torch.no_grad():
        assert not (case.logits + 1).requires_grad
    assert plain(case.logits).requires_grad


def test_hooks_on_it_fire():
    case, seen = Case(), []
    case.logits.register_hook(lambda grad: seen.append(grad.clone()))
    case.logits.retain_grad()
    plain(case.logits).sum().backward()
    assert torch.equal(seen[0], torch.ones(S, B, V))
    assert torch.equal(case.logits.grad, torch.ones(S, B, V))


@pytest.mark.parametrize("save", [torch.save, lambda x, file: pickle.dump(x, file)], ids=["torch.save", "pickle"])
def test_saved_as_ordinary_logits(save):
    """What Megatron's configuration logger does with a dictionary of them; the file needs nothing of this package."""
    case, file = Case(), io.BytesIO()
    save({"logits": case.logits}, file)
    assert b"megatron_patch" not in file.getvalue()
    file.seek(0)
    loaded = (torch.load(file) if save is torch.save else pickle.load(file))["logits"]
    assert type(loaded) is Tensor
    assert torch.equal(loaded, case.compute())


def test_copied_as_ordinary_logits():
    case = Case()
    with pytest.raises(RuntimeError, match="created explicitly by the user"):  # torch's, of any tensor with a graph
        copy.deepcopy(case.logits)
    copied = copy.deepcopy(case.logits.detach())
    assert type(copied) is Tensor
    assert torch.equal(copied, case.compute())
    assert type(copy.copy(case.logits)) is Tensor


def test_printed_and_turned_into_numbers():
    case = Case()
    expected = case.compute()
    assert repr(case.logits.detach()) == repr(expected.detach())
    assert case.logits.tolist() == expected.tolist()
    assert (case.logits.detach().numpy() == expected.detach().numpy()).all()
    assert case.logits[0, 0, 0].item() == expected[0, 0, 0].item()


def test_nothing_keeps_it_alive():
    """Neither a reference cycle nor the graph of a loss that took hidden states and weight."""
    gc.disable()
    try:
        for touch in (lambda x: None, lambda x: x * 2.0, lambda x: x.sum()):
            case = Case()
            loss = (case.logits.origin.hidden @ case.logits.origin.weight.t()).sum()
            touch(case.logits)
            assert len(case.siblings) > 0
            case.logits = None
            assert len(case.siblings) == 0
            loss.backward()
    finally:
        gc.enable()


def test_non_reentrant_checkpoint_around_its_user():
    case, other = Case(), Case()
    result = torch.utils.checkpoint.checkpoint(torch.tanh, case.logits, use_reentrant=False)
    for grad, expected in zip(case.grads(result.sum()), other.grads(other.compute().tanh().sum()), strict=True):
        torch.testing.assert_close(grad, expected)


def test_type():
    assert isinstance(Case().logits, DeferredLogits)
    assert plain(TARGET) is TARGET
    assert not untouched(TARGET)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_a_layer_whose_input_changed_in_place_is_an_error(name):
    """Logits made later would not be those that the layer was asked for; in backward autograd would say the same."""
    case = Case(bias=True)
    with torch.no_grad():
        getattr(case, name).add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place after the layer was called"):
        case.logits.sum()
    case = Case(bias=True)
    loss = Through.apply(case.logits).sum()
    with torch.no_grad():
        getattr(case, name).add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place after the layer was called"):
        loss.backward()
