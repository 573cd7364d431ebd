"""Deferred logits: whatever gets hold of them finds the ordinary ones, once, and no gradient is lost on the way."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from deferred_case import B, Case, S, V
from torch import Tensor

from megatron_patch.deferred import DeferredLogits, plain, untouched
from te_ce import vocab_parallel_cross_entropy

TARGET = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(3))


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


def cpp_first(x):
    return below_torch_functions(x) * 0.5 + x.tanh()


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
    "C++ first": cpp_first,
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
