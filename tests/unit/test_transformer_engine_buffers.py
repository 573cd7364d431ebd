"""Transformer Engine's interface: whose memory is read, copied and overwritten, and what is saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.bounds import check_loss
from tests.support.subject import Subject
from tests.support.transformer_engine import B, S, V, call, draw, truth_of


@pytest.mark.parametrize("change", ["zeroed", "released"])
def test_inp_is_the_callers_again_after_the_call(subject: Subject, change: str) -> None:
    logits, target, g = draw(subject)
    x = logits.clone().requires_grad_()
    inp = x * 1
    loss = call(subject, inp, target)
    assert torch.equal(inp, logits)
    assert inp._version == 0
    if change == "zeroed":
        with torch.no_grad():
            inp.zero_()
    else:
        inp.untyped_storage().resize_(0)
    (grad,) = torch.autograd.grad(loss, x, g)
    torch.testing.assert_close(grad.double().cpu().view(-1, V), truth_of(logits, target, g).grad, rtol=0, atol=1e-6)


def test_inp_is_preserved_in_backward(subject: Subject) -> None:
    logits, target, g = draw(subject)
    x = logits.clone().requires_grad_()
    inp = x * 1
    total = inp.square().sum()
    call(subject, inp, target).backward(g, retain_graph=True)
    assert torch.equal(inp, logits)
    total.backward()
    expected = truth_of(logits, target, g).grad + 2 * logits.cpu().double().view(-1, V)
    torch.testing.assert_close(x.grad.double().cpu().view(-1, V), expected, rtol=0, atol=5e-6)


def test_overwrite_input(subject: Subject) -> None:
    """The gradient is where the logits were, and whoever still needs those hears of it."""
    logits, target, g = draw(subject)
    x = logits.clone().requires_grad_()
    inp = x * 1
    total, version = inp.square().sum(), inp._version
    loss = call(subject, inp, target, overwrite_input=True)
    assert torch.equal(inp, logits)
    (grad,) = torch.autograd.grad(loss, inp, g)
    assert grad.data_ptr() == inp.data_ptr()
    assert inp._version > version
    check_loss(loss, truth_of(logits, target, g))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_second_backward_raises(subject: Subject, overwrite: bool, hooked: bool) -> None:
    logits, target, _ = draw(subject)
    x = logits.clone().requires_grad_()

    def same(tensor: Tensor) -> Tensor:
        return tensor

    if hooked:  # autograd then compares no versions
        with torch.autograd.graph.saved_tensors_hooks(same, same):
            loss = call(subject, x * 1, target, overwrite_input=overwrite).sum()
    else:
        loss = call(subject, x * 1, target, overwrite_input=overwrite).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated before"):
        loss.backward()


def test_second_derivative_raises(subject: Subject) -> None:
    logits, target, _ = draw(subject)
    x = logits.requires_grad_()
    (grad,) = torch.autograd.grad(call(subject, x, target).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.autograd.grad(grad.sum() + x.pow(3).sum(), x)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
def test_saved_state(subject: Subject, reduce: bool, overwrite: bool) -> None:
    """What saved-tensor hooks see: logits (or their copy), m and d, target, and for the mean the number of rows."""
    logits, target, _ = draw(subject, torch.bfloat16)
    x = logits.clone().requires_grad_()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = call(subject, x, target, 0.1, reduce, overwrite_input=overwrite)
    kept, stats, saved_target, *count = saved
    assert (kept.dtype, kept.shape) == (torch.bfloat16, x.shape)
    assert (kept.data_ptr() == x.data_ptr()) == overwrite
    assert (stats.dtype, stats.shape) == (torch.float32, (B * S, 2))
    m = logits.float().amax(-1)
    torch.testing.assert_close(stats[:, 0], m.view(-1))
    torch.testing.assert_close(stats[:, 1], (logits.float() - m[..., None]).exp().sum(-1).view(-1))
    assert torch.equal(saved_target, target)
    assert [(n.dtype, n.tolist()) for n in count] == ([(torch.int64, [B * S - 1])] if reduce else [])
    loss.backward(torch.ones_like(loss))
    assert torch.equal(kept, x.grad)


def test_nothing_is_copied_without_a_gradient(subject: Subject) -> None:
    logits, target, _ = draw(subject)
    x = logits.clone().requires_grad_()
    expected = call(subject, x, target)
    with torch.no_grad():
        loss = call(subject, x, target)
    assert not loss.requires_grad
    assert torch.equal(loss, expected)
    with torch.inference_mode():
        assert torch.equal(call(subject, logits, target), expected)
