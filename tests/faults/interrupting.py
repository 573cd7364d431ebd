"""Errors that come from the inside of a walk: memory that is gone, or a key that was pressed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

OUT_OF_MEMORY: type[BaseException] = torch.cuda.OutOfMemoryError
# Who has what is saved: autograd, which compares versions, or somebody else.
HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "identity": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "save_on_cpu": save_on_cpu,
}
ERRORS = [OUT_OF_MEMORY, KeyboardInterrupt]


@contextlib.contextmanager
def raising(error: type[BaseException], holder: ModuleType, name: str, call: int = 1) -> Iterator[None]:
    """Within: call number `call` of this function raises, once; all others are its own. And it was called so often."""
    real, calls = getattr(holder, name), 0

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error("of the test")
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, function)
        yield
    assert calls >= call, f"{name} was called {calls} times, no error came"
