"""When the gradient takes over the logits' storage, and when it may not.

"taken" means that the gradient arrives in the storage of the logits; every other case must leave the logits as they
were (`torch.equal` with a clone, and the same version) and still give the right gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from te_ce import LossOptions
from te_ce import backend as backends
from tests.support.bounds import check_gradient
from tests.support.dense import dense
from tests.support.subject import Subject

_DTYPES = [torch.float32, torch.bfloat16]


class _Head(torch.autograd.Function):
    """An output layer that keeps nothing: logits = values, and the gradient's address and values are recorded."""

    @staticmethod
    def forward(ctx, values: Tensor, seen: dict) -> Tensor:  # type: ignore[no-untyped-def, override, type-arg]
        ctx.seen = seen
        logits = values.detach().clone()
        seen["address"] = logits.data_ptr()
        return logits

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        ctx.seen["taken"] = grad.data_ptr() == ctx.seen["address"]
        ctx.seen["grad"] = grad.clone()
        return grad.clone(), None


class Model:
    """Values, a fresh logits tensor per call, and what arrived of its gradient."""

    def __init__(self, subject: Subject, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (6, 32)) -> None:
        random = torch.Generator().manual_seed(11)
        self.subject = subject
        self.values = torch.randn(*shape, generator=random).to(dtype).to(subject.device).requires_grad_()
        self.target = torch.randint(shape[-1], shape[:-1], generator=random).to(subject.device)
        self.seen: dict = {}  # type: ignore[type-arg]

    def logits(self) -> Tensor:
        out: Tensor = _Head.apply(self.values, self.seen)
        return out

    def loss(self, logits: Tensor, **keywords: object) -> Tensor:
        return self.subject.loss(logits, self.target, **keywords)

    def check(self, grad: Tensor | None = None, scale: float = 1.0) -> None:
        """The recorded (or given) gradient is that of the summed loss times `scale`."""
        grad = self.seen["grad"] if grad is None else grad
        g = torch.full(self.target.shape, scale, device=self.target.device)
        truth = dense(self.values, self.target, LossOptions(), g)
        ulps = self.subject.allowed_ulps(self.values.dtype)
        check_gradient(grad, truth, self.values, self.target, LossOptions(), g, ulps)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 32), (3, 2, 32), (2, 3, 2, 8)], ids=str)
def test_dropped_logits_are_taken_over(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model = Model(subject, dtype, shape)
    model.loss(model.logits()).sum().backward()
    assert model.seen["taken"]
    model.check()


def test_taken_over_again_in_every_step(subject: Subject) -> None:
    model = Model(subject)
    for _ in range(3):
        model.loss(model.logits(), reduction="mean").backward()
        assert model.seen["taken"]


def test_false_never_overwrites(subject: Subject) -> None:
    model = Model(subject)
    model.loss(model.logits(), inplace=False).sum().backward()
    assert not model.seen["taken"]
    model.check()


def _views(logits: Tensor) -> object:
    return logits[1:, :3]


_KEPT: dict[str, Callable[[Tensor], object]] = {
    "variable": lambda logits: logits,
    "view": _views,
    "detached": lambda logits: logits.detach(),
    "data": lambda logits: logits.data,
    "storage": lambda logits: logits.untyped_storage(),
    "numpy": lambda logits: logits.detach().cpu().numpy() if logits.is_cuda else logits.detach().numpy(),
    "flattened": lambda logits: logits.view(-1),
    "in_a_list": lambda logits: [logits],
    "activation_of_sin": lambda logits: logits.sin().sum(),
    "activation_of_square": lambda logits: (logits * logits).sum(),
}


@pytest.mark.parametrize("kept", list(_KEPT))
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_logits_that_somebody_keeps_are_untouched(subject: Subject, kept: str, dtype: torch.dtype) -> None:
    if kept == "numpy" and dtype == torch.bfloat16:
        dtype = torch.float16  # numpy has no bfloat16
    model = Model(subject, dtype)
    logits = model.logits()
    holder = _KEPT[kept](logits)
    # A copy: numpy's hold on memory, once it had one, would be reason enough to leave it alone.
    before = logits.detach().clone().cpu().view(-1)
    storage_address = logits.untyped_storage().data_ptr()
    loss = model.loss(logits)
    keep_alive = logits.detach() if kept == "variable" else None
    del logits
    loss.sum().backward()
    shares_memory = not (kept == "numpy" and subject.device.type == "cuda")
    assert model.seen["taken"] is not shares_memory
    model.check()
    if kept in ("variable", "view", "detached", "data", "flattened") and isinstance(holder, Tensor):
        assert holder.untyped_storage().data_ptr() == storage_address
        whole = torch.empty(0, dtype=dtype, device=holder.device).set_(holder.untyped_storage())
        assert torch.equal(whole.cpu(), before)
        assert holder._version == 0
    del keep_alive


@pytest.mark.parametrize("inplace", ["auto", False])
def test_forward_leaves_the_logits_alone(subject: Subject, inplace: object) -> None:
    model = Model(subject, torch.bfloat16)
    logits = model.logits()
    before = logits.clone()
    best = logits.argmax(-1)
    loss = model.loss(logits, inplace=inplace)
    assert torch.equal(logits, before)
    assert torch.equal(logits.argmax(-1), best)
    loss.sum().backward()
    assert torch.equal(logits, before)
    assert torch.equal(logits.argmax(-1), best)
    assert logits._version == 0


def test_forward_leaves_the_logits_alone_even_when_backward_will_not(subject: Subject) -> None:
    model = Model(subject)
    logits = model.logits()
    before = logits.clone()
    loss = model.loss(logits, inplace=True)
    assert torch.equal(logits, before)
    assert logits._version == 0
    loss.sum().backward()
    assert model.seen["taken"]
    assert logits._version > 0
    model.check()


@pytest.mark.parametrize("inplace", ["auto", False])
def test_a_leaf_keeps_its_values(subject: Subject, inplace: object) -> None:
    model = Model(subject, shape=(7, 11))
    leaf = model.values
    before = leaf.detach().clone()
    model.target[2] = -100
    model.loss(leaf, inplace=inplace).sum().backward(retain_graph=False)
    assert torch.equal(leaf, before)
    assert leaf._version == 0
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() != leaf.data_ptr()
    model.check(leaf.grad)


@pytest.mark.parametrize("inplace", ["auto", False])
def test_a_retained_graph_gives_the_same_gradient_again(subject: Subject, inplace: object) -> None:
    model = Model(subject, shape=(7, 11))
    loss = model.loss(model.logits(), inplace=inplace).sum()
    loss.backward(retain_graph=True)
    assert not model.seen["taken"]
    first = model.seen["grad"]
    loss.backward(retain_graph=True)
    assert torch.equal(model.seen["grad"], first)
    loss.backward()
    assert torch.equal(model.seen["grad"], first)
    assert model.values.grad is not None
    torch.testing.assert_close(model.values.grad, 3 * first)


def test_two_losses_on_the_same_logits(subject: Subject) -> None:
    model = Model(subject)
    other = (model.target + 5) % 32
    for summed in (True, False):
        model.values.grad = None
        logits = model.logits()
        first = model.loss(logits).sum()
        second = subject.loss(logits, other, label_smoothing=0.1).sum()
        del logits
        if summed:
            (first + second).backward()
        else:
            second.backward()
            first.backward()
        x = model.values.detach().double().requires_grad_()
        expected = torch.nn.functional.cross_entropy(x, model.target, reduction="sum")
        expected = expected + torch.nn.functional.cross_entropy(x, other, reduction="sum", label_smoothing=0.1)
        expected.backward()
        torch.testing.assert_close(model.values.grad.double(), x.grad, atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_loss_beside_another_use_of_the_logits(subject: Subject, dtype: torch.dtype) -> None:
    model = Model(subject, dtype)
    logits = model.logits()
    before = logits.clone()
    (model.loss(logits).sum() + (logits**2).sum()).backward()
    assert torch.equal(logits, before)
    x = model.values.detach().double().requires_grad_()
    (torch.nn.functional.cross_entropy(x, model.target, reduction="sum") + (x**2).sum()).backward()
    # The sum of two gradients is rounded to the logits' dtype by autograd.
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(model.values.grad.double(), x.grad, rtol=rtol, atol=atol)


def test_saved_tensor_hooks_that_keep_the_tensor(subject: Subject) -> None:
    model = Model(subject)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(model.logits()).sum()
    before = [tensor.clone() for tensor in kept]
    loss.backward()
    assert not model.seen["taken"]
    assert all(torch.equal(old, new) for old, new in zip(before, kept, strict=True))
    model.check()


def test_saved_tensors_offloaded_to_the_host(subject: Subject) -> None:
    model = Model(subject)
    with torch.autograd.graph.save_on_cpu():
        loss = model.loss(model.logits()).sum()
    loss.backward()
    model.check()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_head_and_loss(subject: Subject, use_reentrant: bool) -> None:
    model = Model(subject)

    def head_and_loss(values: Tensor) -> Tensor:
        logits: Tensor = _Head.apply(values, model.seen)
        return model.loss(logits)

    loss = torch.utils.checkpoint.checkpoint(head_and_loss, model.values, use_reentrant=use_reentrant)
    loss.sum().backward()
    model.check()
    model.check(model.values.grad)


def test_expanded_logits(subject: Subject) -> None:
    row = torch.randn(1, 16, generator=torch.Generator().manual_seed(2)).to(subject.device).requires_grad_()
    target = torch.arange(5, device=subject.device)
    subject.loss(row.expand(5, 16), target).sum().backward()
    x = row.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(x.expand(5, 16), target, reduction="sum").backward()
    torch.testing.assert_close(row.grad.double(), x.grad, atol=1e-6, rtol=0)


def test_true_refuses_rows_that_share_memory(subject: Subject) -> None:
    row = torch.randn(1, 16, device=subject.device)
    with pytest.raises(ValueError, match=r"inplace: expected logits whose rows do not share memory"):
        subject.loss(row.expand(5, 16), torch.arange(5, device=subject.device), inplace=True)
    overlapping = torch.randn(64, device=subject.device).as_strided((4, 16), (8, 1))
    with pytest.raises(ValueError, match=r"inplace: .*share memory"):
        subject.loss(overlapping, torch.arange(4, device=subject.device), inplace=True)


def test_true_refuses_logits_that_would_be_copied(subject: Subject) -> None:
    logits = torch.randn(16, 5, device=subject.device).t()
    with pytest.raises(ValueError, match=r"inplace: expected logits that can be read in place"):
        subject.loss(logits, torch.arange(5, device=subject.device), inplace=True)


def test_true_overwrites_a_leaf(subject: Subject) -> None:
    model = Model(subject)
    leaf = model.values.detach().clone().requires_grad_()
    model.loss(leaf, inplace=True).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == leaf.data_ptr()
    model.check(leaf.grad)


def test_true_makes_a_second_backward_raise(subject: Subject) -> None:
    model = Model(subject)
    loss = model.loss(model.logits(), inplace=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_true_makes_a_later_use_by_autograd_raise(subject: Subject) -> None:
    model = Model(subject)
    logits = model.logits()
    square = (logits**2).sum()
    model.loss(logits, inplace=True).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_strided_logits_are_overwritten_in_their_own_layout(subject: Subject) -> None:
    model = Model(subject, shape=(4, 2, 8))
    seen: dict = {}  # type: ignore[type-arg]
    logits = _Head.apply(model.values, seen)
    swapped = logits.transpose(0, 1)
    del logits
    subject.loss(swapped, model.target.t(), inplace=True).sum().backward()
    assert seen["taken"]
    model.check(seen["grad"])


def test_no_owner_is_trusted_where_the_counts_are_unavailable(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    from te_ce import ownership

    monkeypatch.setattr(ownership, "owner_counts", lambda tensor: None)
    model = Model(subject)
    model.loss(model.logits()).sum().backward()
    assert not model.seen["taken"]
    model.check()


def test_a_calibration_that_cannot_tell_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_ce import ownership

    blind = ownership._Calibration()
    monkeypatch.setattr(ownership, "owner_counts", lambda tensor: ownership.OwnerCounts(1, 1, 1, 1))
    blind.run()
    assert blind.done
    assert blind.result is None
    high = ownership._Calibration()
    monkeypatch.setattr(ownership, "_counts_in_backward", lambda keep: ownership.OwnerCounts(9, 9, 9, 9))
    high.run()
    assert high.result is None


class _Produces(torch.autograd.Function):
    """Logits made by `produce` outside of torch's own memory or layout; the gradient is recorded."""

    @staticmethod
    def forward(ctx, values: Tensor, produce: Callable[[Tensor], Tensor], seen: dict) -> Tensor:  # type: ignore[no-untyped-def, override, type-arg]
        ctx.seen = seen
        logits = produce(values.detach().clone())
        ctx.shape = values.shape
        return logits

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def, override]
        ctx.seen["grad"] = grad.clone()
        return grad.new_zeros(ctx.shape), None, None


@pytest.mark.parametrize("owner", ["numpy", "dlpack", "frombuffer", "file", "shared"])
def test_memory_that_torch_does_not_own_is_untouched(
    subject: Subject, owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owners show in no count of torch's. Such memory is the host's: CUDA tensors only come by DLPack."""
    model = Model(subject)
    kept: list[object] = []

    def produce(values: Tensor) -> Tensor:
        if owner == "dlpack":
            kept.append(values)
            return torch.from_dlpack(values)
        array = values.cpu().numpy().copy()
        if owner == "numpy":
            kept.append(array)
            return torch.from_numpy(array)
        if owner == "frombuffer":
            kept.append(bytearray(array.tobytes()))
            return torch.frombuffer(kept[0], dtype=torch.float32).view(values.shape)
        if owner == "file":
            array.tofile(tmp_path / "logits")
            return torch.from_file(str(tmp_path / "logits"), shared=True, size=array.size).view(values.shape)
        return values.cpu().share_memory_()

    on_host = owner != "dlpack"
    values = model.values.detach().cpu() if on_host else model.values.detach()
    target = model.target.cpu() if on_host else model.target
    serving = subject
    if on_host and subject.device.type == "cuda":
        # The kernels can't read the host's memory; ownership is decided in the same lines for both.
        serving = dataclasses.replace(subject, backend=backends._torch_backend())
    seen: dict = {}  # type: ignore[type-arg]
    addresses: list[int] = []

    def recorded(values: Tensor) -> Tensor:
        logits = produce(values)
        addresses.append(logits.data_ptr())
        return logits

    logits = _Produces.apply(values.requires_grad_(), recorded, seen)
    loss = serving.loss(logits, target).sum()
    before = logits.detach().clone()
    taken: list[bool] = []
    logits.register_hook(lambda grad: taken.append(grad.data_ptr() == addresses[0]))
    del logits
    loss.backward()
    assert taken == [False]
    if owner == "numpy":
        assert (torch.from_numpy(kept[0]) == before).all()


def test_overlapping_rows_are_not_overwritten(subject: Subject) -> None:
    model = Model(subject, shape=(5, 16))
    for strides in ((8, 1), (0, 1)):
        grads = []
        for inplace in ("auto", False):
            seen: dict = {}  # type: ignore[type-arg]

            def produce(values: Tensor, strides: tuple[int, int] = strides) -> Tensor:
                whole = torch.empty(0, device=values.device)
                return whole.set_(values.untyped_storage(), 0, (5, 16), strides)

            logits = _Produces.apply(model.values, produce, seen)
            loss = subject.loss(logits, model.target, inplace=inplace).sum()
            del logits
            loss.backward()
            grads.append(seen["grad"])
        assert torch.equal(*grads)


class _Interrupt(BaseException):
    """As a KeyboardInterrupt, which test runners have other uses for."""


@pytest.mark.parametrize("inplace", ["auto", True])
def test_an_interrupted_backward_is_not_repeated_on_half_a_gradient(subject: Subject, inplace: object) -> None:
    overwritten = []

    def interrupted(logits: Tensor, target: Tensor, grads: object, saved: Tensor, out: Tensor, *others: object) -> None:
        overwritten.append(out is logits)
        out.view(-1)[:5].detach().zero_()
        raise _Interrupt

    model = Model(subject)
    broken = dataclasses.replace(subject, backend=subject.backend._replace(logits_gradient=interrupted))
    loss = broken.loss(model.logits(), model.target, inplace=inplace).sum()
    with pytest.raises(_Interrupt):
        loss.backward()
    if overwritten[0]:
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|backward through the graph a second"):
            loss.backward()
    else:
        # In doubt "auto" takes a buffer: nothing is lost, and backward begins anew.
        assert inplace == "auto"
        with pytest.raises(_Interrupt):
            loss.backward()


@pytest.mark.parametrize("inplace", ["auto", False])
def test_the_gradient_cannot_be_differentiated_again(subject: Subject, inplace: object) -> None:
    model = Model(subject)
    loss = model.loss(model.logits(), inplace=inplace).sum()
    (grad,) = torch.autograd.grad(loss, model.values, create_graph=True)
    model.check()
    with pytest.raises(RuntimeError, match="differentiated again, which is not supported"):
        torch.autograd.grad((grad**2).sum(), model.values)


def test_the_loss_can_be_changed_in_place(subject: Subject) -> None:
    model = Model(subject)
    loss = model.loss(model.logits())
    loss[0] = 0.0
    loss *= 2.0
    loss.sum().backward()
    assert (model.seen["grad"][0] == 0).all()
    assert (model.seen["grad"][1] != 0).any()
