"""Logits that are not computed until somebody looks: what the output layer hands on where the loss is fused with it.

The loss takes the layer's input and weight from the object and never makes the logits. Whatever else touches it gets
the ordinary logits: the layer's own forward runs then, once, with its graph, and this tensor is what every function
of torch works on from there, in-place ones, hooks and `.data_ptr()` included. Only what follows from the shape
(`.shape`, `.dtype`, `len()` and the like), and the product with a number, are answered without.

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
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Origin:
    """What deferred logits are made of. Held by the object and its node, never the other way round.

    Args:
        layer: the output layer.
        compute: runs the layer's own forward on the same arguments; its logits [s, b, V / TP].
        hidden: [s, b, H], or this rank's [s / TP, b, H] under sequence parallelism: the layer's input, with its graph.
        weight: [V / TP, H], the one that the layer was called with.
        bias: [V / TP] or None.
        shape: of the logits.
        scale: number that the layer's output was multiplied by since.
        siblings: where to enter it, so that somebody can find the logits still held; weak.
    """

    def __init__(
        self,
        layer: Any,
        compute: Callable[[], Tensor],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: tuple[int, ...],
        siblings: weakref.WeakSet[Origin],
        scale: float = 1.0,
    ):
        self.layer, self.hidden, self.weight, self.bias = layer, hidden, weight, bias
        self.shape, self.scale = shape, scale
        self.made: Tensor | None = None
        self._compute, self._siblings = compute, siblings
        self._with_grad = torch.is_grad_enabled()
        siblings.add(self)

    def logits(self) -> Tensor:
        """The ordinary logits, in every call the same tensor, with a graph if there was one to be had at the layer."""
        if self.made is None:
            # A metric may ask first, without gradients, and the loss, with them, later.
            with _recorded(), torch.set_grad_enabled(self._with_grad):
                self.made = self._compute()
        return self.made

    def times(self, factor: float) -> Origin:
        """These logits times a number."""
        return Origin(
            self.layer,
            lambda: self.logits() * factor,
            self.hidden,
            self.weight,
            self.bias,
            self.shape,
            self._siblings,
            self.scale * factor,
        )

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
        if func in _ANSWERED_BY_SHAPE and untouched(args[0]):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _PRODUCTS and (product := _product(*args, **kwargs)) is not None:
            return product
        args, kwargs = tree_map_only(DeferredLogits, plain, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: plain(logits).detach(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


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


def untouched(logits: object) -> bool:
    """Whether this is a deferred object that nobody has looked into."""
    return isinstance(logits, DeferredLogits) and logits.origin.made is None and _grad_fn(logits) is logits.node


class _Deferral(torch.autograd.Function):
    """The object's node. Whoever has the object but not its logits sends its gradient here."""

    @staticmethod
    def forward(ctx: Any, origin: Origin, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        ctx.origin = origin
        logits: DeferredLogits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            DeferredLogits, origin.shape, dtype=hidden.dtype, device=hidden.device
        )
        logits.origin = origin
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        origin = ctx.origin
        inputs = (origin.hidden, origin.weight, origin.bias)
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        # The layer's own backward, with its communication and its accumulation into main_grad.
        found = torch.autograd.grad(
            origin.logits(), [inputs[place] for place in wanted], grads[0], retain_graph=True, allow_unused=True
        )
        result: list[Tensor | None] = [None] * 4
        for place, grad in zip(wanted, found, strict=True):
            result[1 + place] = grad
        return tuple(result)


def _product(*args: Any, **kwargs: Any) -> DeferredLogits | None:
    """Deferred logits times a number, still deferred; None for any other product. Megatron scales logits so (MuP)."""
    if kwargs or len(args) != 2:
        return None
    logits, factor = args if isinstance(args[0], DeferredLogits) else args[::-1]
    if not untouched(logits) or isinstance(factor, bool) or not isinstance(factor, int | float):
        return None
    if factor == 0 or not math.isfinite(factor):  # nothing that a scale of the loss can be
        return None
    return logits.origin.times(float(factor)).defer()


def _grad_fn(logits: Tensor) -> object:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.grad_fn


@contextmanager
def _recorded() -> Iterator[None]:
    """Within: autograd records, also where a call from C++ has left it on the way to `__torch_dispatch__`."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD):
        yield


_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _key in ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "AutogradOther"):
    _AUTOGRAD = _AUTOGRAD | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))

_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}
_ANSWERED_BY_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse", "is_quantized")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "element_size", "__len__")),
    *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "stride", "is_contiguous")),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
