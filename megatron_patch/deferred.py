"""Logits that are not computed until somebody looks: what the output layer hands on where the loss is fused with it.

The loss takes the layer's input and weight from the object and never makes the logits. Whatever else touches it gets
the ordinary logits: the layer's own forward runs then, once, with its graph, and this tensor is what every function
of torch works on from there, in-place ones, hooks and `.data_ptr()` included. The loss is computed on it, too, once
somebody has changed it or asked for its gradient. Only what follows from the shape
(`.shape`, `.dtype`, `len()` and the like), the product with a number, and the largest of each row, without its
gradient, are answered without.

The object is a tensor without storage, made by an autograd node. A plain object that offers `__torch_function__`
would do for functions of torch, but code that hands it to an `autograd.Function`, as Megatron's own losses do, would
silently lose its gradient: autograd sees tensors only. Here autograd sees one, whose node hands any gradient to the
graph of the ordinary logits. Calls from C++ arrive at `__torch_dispatch__` and get the same logits.

One thing cannot be followed: an `autograd.Function` that declares that it changed the object in place puts another
node in the place of ours. That raises.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_patch.maxima import row_maxima


class Origin:
    """What deferred logits are made of. Held by the object and its node, never the other way round.

    Args:
        layer: the output layer.
        compute: runs the layer's own forward on `hidden`, or a tensor like it, and the other arguments that it had;
            gives its logits [s, b, V / TP].
        hidden: [s, b, H], or this rank's [s / TP, b, H] under sequence parallelism: the layer's input, with its graph.
        weight: [V / TP, H], the one that the layer was called with.
        bias: [V / TP] or None.
        shape: of the logits.
        siblings: where to enter it, so that somebody can find the logits still held; weak.
        factors: numbers that the layer's output was multiplied by since, one after the other.
    """

    def __init__(
        self,
        layer: Any,
        compute: Callable[[Tensor], Tensor],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: tuple[int, ...],
        siblings: weakref.WeakSet[Origin],
        factors: tuple[float, ...] = (),
    ):
        self.layer, self.hidden, self.weight, self.bias, self.shape = layer, hidden, weight, bias, shape
        self.scale = math.prod(factors)
        self.made: Tensor | None = None
        self._compute, self._siblings, self._factors = compute, siblings, factors
        self._with_grad = torch.is_grad_enabled()
        self._made_as: tuple[object, int] = (None, 0)
        self._versions = self._read_versions()
        siblings.add(self)

    def logits(self) -> Tensor:
        """The ordinary logits, in every call the same tensor, with a graph if there was one to be had at the layer."""
        if self.made is None:
            self.check_unchanged()
            # A metric may ask first, without gradients, and the loss, with them, later.
            with _recorded(), torch.set_grad_enabled(self._with_grad):
                self.made = self.logits_of(self.hidden)
            self._made_as = _state(self.made)
        return self.made

    def is_intact(self) -> bool:
        """Whether nobody has changed the logits, if they were made, or asked for their gradient."""
        made = self.made
        if made is None:
            return True
        is_watched = bool(made._backward_hooks) or made.retains_grad
        return not made.is_inference() and not is_watched and _state(made) == self._made_as

    def gradients(self, grad: Tensor, needed: tuple[bool, bool, bool]) -> list[Tensor | None]:
        """Those of hidden, weight and bias where `needed`, from that of the logits, by the layer's own backward.

        With its communication and its accumulation into main_grad; on a graph of its own, since that of the logits,
        if they were made, may be part of the same backward, which frees it. Unless they were changed in place: that is
        in their graph only.
        """
        with torch.enable_grad():
            hidden = self.hidden
            if self.made is not None and self.made.grad_fn is not self._made_as[0]:
                logits = self.made
            else:
                self.check_unchanged()
                hidden = hidden.detach().requires_grad_(needed[0])
                logits = self.logits_of(hidden)
        tensors = (hidden, self.weight, self.bias)
        inputs = [tensor for tensor, wanted in zip(tensors, needed, strict=True) if wanted and tensor is not None]
        found = iter(torch.autograd.grad(logits, inputs, grad, retain_graph=True, allow_unused=True))
        return [next(found) if wanted else None for wanted in needed]

    def check_unchanged(self) -> None:
        """That hidden states and weight are still what the layer was called with.

        Raises:
            RuntimeError: one of them was changed in place since; the logits would not be those that were asked for.
        """
        if self._read_versions() != self._versions:
            raise RuntimeError(
                "the output layer's input, weight or bias was changed in place after the layer was called, whose "
                'logits te_ce_linear has deferred; set cross_entropy_fusion_impl="te_ce"'
            )

    def _read_versions(self) -> list[int]:
        tensors = [tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]
        return [tensor._version for tensor in tensors if not tensor.is_inference()]

    def logits_of(self, hidden: Tensor) -> Tensor:
        """What the layer, and the factors since, make of `hidden`: a tensor in its place, of any number of rows."""
        with _unseen_by_checkpoints():
            logits = self._compute(hidden)
            for factor in self._factors:
                logits = logits * factor
        return logits

    def times(self, factor: float) -> Origin:
        """These logits times a number."""
        tensors = self.hidden, self.weight, self.bias
        return Origin(self.layer, self._compute, *tensors, self.shape, self._siblings, (*self._factors, factor))

    def defer(self) -> DeferredLogits:
        """The object."""
        logits: DeferredLogits = _Deferral.apply(self, self.hidden, self.weight, self.bias)
        logits.node = _grad_fn(logits)
        return logits


class DeferredLogits(Tensor):
    """Logits [s, b, V / TP] without storage; see the module. `plain` and `untouched` tell its two states apart."""

    origin: Origin
    node: object

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _CLEARED_BY_AUTOGRAD or (func in _ANSWERED_BY_SHAPE and untouched(args[0])):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _PRODUCTS and (product := _product(*args, **kwargs)) is not None:
            return product
        if func in _MAXIMA and (maxima := _maxima(func, *args, **kwargs)) is not None:
            return maxima
        args, kwargs = tree_map_only(DeferredLogits, plain, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: plain(logits).detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def plain(logits: Tensor) -> Tensor:
    """The ordinary logits of a deferred object; any other tensor as it is.

    Raises:
        RuntimeError: an autograd function changed the object in place.
    """
    if not isinstance(logits, DeferredLogits):
        return logits
    if _grad_fn(logits) is not logits.node:
        raise RuntimeError(
            "an autograd.Function changed deferred logits in place (mark_dirty), which te_ce_linear cannot follow; "
            'set cross_entropy_fusion_impl="te_ce"'
        )
    return logits.origin.logits()


def intact(logits: object) -> TypeGuard[DeferredLogits]:
    """Whether this is a deferred object that is still what the layer made of its input; looked into or not.

    A look on one rank alone must not make that rank do something else than the others.
    """
    return isinstance(logits, DeferredLogits) and _grad_fn(logits) is logits.node and logits.origin.is_intact()


def untouched(logits: object) -> TypeGuard[DeferredLogits]:
    """Whether this is a deferred object that nobody has looked into."""
    return isinstance(logits, DeferredLogits) and logits.origin.made is None and _grad_fn(logits) is logits.node


class _Deferral(torch.autograd.Function):
    """The object's node. Whoever has the object but not its logits sends its gradient here."""

    @staticmethod
    def forward(ctx: Any, origin: Origin, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        ctx.origin = origin
        logits: DeferredLogits = Tensor._make_wrapper_subclass(
            DeferredLogits, origin.shape, dtype=hidden.dtype, device=hidden.device
        )
        logits.origin = origin
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.origin.gradients(grads[0], ctx.needs_input_grad[1:])


def _product(*args: Any, **kwargs: Any) -> DeferredLogits | None:
    """Deferred logits times a number, still deferred; None for any other product. Megatron scales logits so (MuP)."""
    if kwargs or len(args) != 2:
        return None
    logits, factor = args if isinstance(args[0], DeferredLogits) else args[::-1]
    if not intact(logits) or isinstance(factor, bool) or not isinstance(factor, int | float):
        return None
    if factor == 0 or not math.isfinite(factor):  # nothing that a scale of the loss can be
        return None
    origin: Origin = logits.origin
    return origin.times(float(factor)).defer()


def _maxima(func: Any, logits: object, dim: object = None, keepdim: bool = False, **others: Any) -> Any:
    """Largest logit of each row, or its index, where no gradient is asked for; None: something else was asked for."""
    if keepdim or others or not isinstance(dim, int) or not untouched(logits):
        return None
    if dim not in (-1, logits.ndim - 1) or logits.numel() == 0:
        return None
    if func in (torch.argmax, Tensor.argmax):
        return row_maxima(logits.origin)[1]
    if logits.requires_grad and torch.is_grad_enabled():
        return None
    return torch.return_types.max(row_maxima(logits.origin))


def _state(made: Tensor) -> tuple[object, int]:
    """What in-place operations on a tensor change."""
    return made.grad_fn, 0 if made.is_inference() else made._version


def _grad_fn(logits: Tensor) -> object:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.grad_fn


@contextmanager
def _recorded() -> Iterator[None]:
    """Within: autograd records, also where a call from C++ has left it on the way to `__torch_dispatch__`."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD):
        yield


@contextmanager
def _unseen_by_checkpoints() -> Iterator[None]:
    """Within: tensors are saved as they are. A checkpoint counts them, and will find the logits made already."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _key in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "AutogradOther"):
    _AUTOGRAD = _AUTOGRAD | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))

# By C++, of a tensor that a function declares to have changed.
_CLEARED_BY_AUTOGRAD = Tensor._backward_hooks.__set__  # type: ignore[union-attr]
_MAXIMA = {torch.max, Tensor.max, torch.argmax, Tensor.argmax}
_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}
_ANSWERED_BY_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse", "is_quantized")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "element_size", "__len__")),
    *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "stride", "is_contiguous")),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
