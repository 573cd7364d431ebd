"""Replace attributes of modules and classes, and put them back: knows nothing of Megatron.

A binding is one (holder, attribute) pair. What a caller really calls is the binding it looks up at call time,
which is seldom the one where a function was defined: `from a import f` makes another. So a replacement is done on a
list of bindings, all or none, each read back after it was written; and it is undone by identity, also in modules
that picked the replacement up later, never over what another party has put there since.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

from megatron_patch.errors import PatchError

ABSENT = object()
"""In the place of an attribute that a holder does not have."""


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """One attribute of a module or class, what it held before and what replaces it.

    Args:
        holder: module or class whose own `__dict__` holds the attribute.
        attribute: its name there.
        original: the object found there, exactly as in `__dict__`; ABSENT where there is none, only an inherited one.
        replacement: the object to put there.
        role: why it is replaced, for `status()`.
    """

    holder: Any
    attribute: str
    original: object
    replacement: object
    role: str = ""

    @property
    def owner(self) -> str:
        """Dotted name of the holder."""
        if isinstance(self.holder, ModuleType):
            return self.holder.__name__
        return f"{self.holder.__module__}.{self.holder.__qualname__}"

    @property
    def name(self) -> str:
        """Dotted name of the binding."""
        return f"{self.owner}.{self.attribute}"

    def found(self) -> object:
        """What the binding holds now."""
        return _own_attributes(self.holder).get(self.attribute, ABSENT)

    def is_ours(self) -> bool:
        """Whether the binding holds the replacement now."""
        return self.found() is self.replacement


def describe(value: object) -> str:
    """Where an object comes from, for messages: its module and qualified name, else its repr."""
    if value is ABSENT:
        return "nothing"
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '?')}.{name}" if name else repr(value)[:80]


def aliases(target: object) -> Iterator[tuple[ModuleType, str]]:
    """Every (module, attribute) in `sys.modules` that holds this very object, each module once."""
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        for attribute, value in list(_own_attributes(module).items()):
            if value is target:
                yield module, attribute


def install(bindings: list[Binding]) -> None:
    """Put every replacement in place, or none of them.

    Raises:
        PatchError: the list is empty, or a binding does not hold its original, refuses the replacement or drops it.
    """
    if not bindings:
        raise PatchError("nothing to replace: expected at least one binding, found none")
    touched: list[Binding] = []
    try:
        for binding in bindings:
            if binding.found() is not binding.original:
                raise PatchError(f"{binding.name}: changed while the patch was applied; apply it again")
            touched.append(binding)
            try:
                setattr(binding.holder, binding.attribute, binding.replacement)
            except Exception as error:
                raise PatchError(f"{binding.name}: cannot be replaced ({error})") from error
            if not binding.is_ours():
                raise PatchError(f"{binding.name}: assigned, but still holds {describe(binding.found())}")
    except BaseException:
        for binding in reversed(touched):
            if binding.is_ours():
                _put_back(binding)
        raise


def restore(bindings: list[Binding]) -> list[Binding]:
    """Put every original back where the replacement still is; returns the bindings that others have taken over."""
    foreign = [binding for binding in bindings if not binding.is_ours()]
    for binding in reversed(bindings):
        if binding.is_ours():
            _put_back(binding)
    # Modules imported meanwhile took our object from the patched module; left alone they would keep it for good.
    for binding in (binding for binding in bindings if binding.original is not ABSENT):
        for module, attribute in list(aliases(binding.replacement)):
            setattr(module, attribute, binding.original)
    return foreign


def _put_back(binding: Binding) -> None:
    if binding.original is ABSENT:
        delattr(binding.holder, binding.attribute)
    else:
        setattr(binding.holder, binding.attribute, binding.original)


def _own_attributes(holder: Any) -> dict[str, Any]:
    # A lazily loaded module runs its import on any ordinary attribute access, `vars()` included.
    if isinstance(holder, ModuleType):
        return cast(dict[str, Any], object.__getattribute__(holder, "__dict__"))
    return cast(dict[str, Any], holder.__dict__)
