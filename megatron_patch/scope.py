"""While a model's forward runs with labels: the only time in which its output layer may defer the logits.

`LanguageModule.__call__` opens the scope, for every model class of every release, those made before the patch
included. User code that calls the output layer by itself, generation, and a model without labels never see a deferred
object. And none outlives the scope: logits that somebody still holds when the forward ends are made then, as the
weight may change before they are looked at.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatron_patch.application import Application
from megatron_patch.config import asks_for_linear
from megatron_patch.deferred import DeferredLogits, Origin, plain

_LABELS = ("labels", "lm_labels")


def _surroundings() -> tuple[bool, object]:
    """What a checkpoint changes around the code that it will run again in backward, where there is no scope."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), hooks


@dataclasses.dataclass(eq=False)
class Scope:
    """One forward of one model with labels.

    Args:
        model: the LanguageModule.
        surroundings: of its forward, as far as a checkpoint changes them.
        origins: of the logits deferred in it.
        reason: why its output layer did not defer the last time; None: it did, or was not called.
    """

    model: Any
    surroundings: tuple[bool, object] = dataclasses.field(default_factory=_surroundings)
    origins: weakref.WeakSet[Origin] = dataclasses.field(default_factory=weakref.WeakSet)
    reason: str | None = None

    def is_checkpointed(self) -> bool:
        """Whether the code running now is inside an activation checkpoint that the forward is not inside of."""
        grad, hooks = _surroundings()
        return grad is not self.surroundings[0] or hooks != self.surroundings[1]


_current: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("megatron_patch_scope", default=None)


def current_scope() -> Scope | None:
    """The innermost forward with labels of a model that asks for te_ce_linear, None outside."""
    return _current.get()


def output_layers(model: Any) -> list[Any]:
    """The output layer of a LanguageModule; T5 keeps its own in the head."""
    owners = (model, getattr(model, "lm_head", None))
    return [layer for owner in owners if (layer := getattr(owner, "output_layer", None)) is not None]


def make_call(holder: Any, original: object, application: Application) -> Callable[..., Any]:
    """`LanguageModule.__call__`, which the class inherits: the inherited one, within a scope where there are labels.

    Args:
        holder: the class that gets it.
        original: what it has of its own; not callable: nothing.
        application: of the patch.
    """

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        inherited = super(holder, self).__call__
        call = functools.partial(original, self) if callable(original) else inherited
        if not application.active or not asks_for_linear(getattr(self, "config", None)):
            return call(*args, **kwargs)
        scope = Scope(self) if _has_labels(self, args, kwargs) and not torch.compiler.is_compiling() else None
        token = _current.set(scope)
        try:
            output = call(*args, **kwargs)
        finally:
            _current.reset(token)
        if scope is not None:
            for origin in list(scope.origins):
                origin.logits()
        # A loss method of the model's own may hand on what it was given.
        return plain(output) if isinstance(output, DeferredLogits) else output

    return __call__


def _has_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if any(kwargs.get(name) is not None for name in _LABELS):
        return True
    places = _places_of_labels(type(model).forward)
    return any(place < len(args) and args[place] is not None for place in places)


@functools.lru_cache(maxsize=64)
def _places_of_labels(forward: Callable[..., Any]) -> tuple[int, ...]:
    names = list(inspect.signature(forward).parameters)[1:]
    return tuple(names.index(name) for name in _LABELS if name in names)
