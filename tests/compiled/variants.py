"""Kernels with one passage of their source changed: what every check must refuse."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import triton

from te_ce.kernels import coefficients, gradient, merge, rows, statistics, vectors, walk
from tests.compiled.build import GRADIENT, MERGE, ROW_LOSS, STATISTICS

_MODULES: dict[str, ModuleType] = {
    STATISTICS: statistics,
    ROW_LOSS: statistics,
    MERGE: merge,
    GRADIENT: gradient,
}


# What kernels import, in the order in which they import each other.
_HELPERS = (rows, coefficients, vectors, walk)


def changed_kernel(name: str, old: str, new: str, folder: Path) -> triton.JITFunction:
    """The kernel `name` with `old`, which must occur once in its file and those of its helpers, replaced by `new`.

    Args:
        folder: where the changed files are written; Triton reads a kernel's source from its file.
    """
    sources = {module: inspect.getsource(module) for module in (*_HELPERS, _MODULES[name])}
    found = sum(source.count(old) for source in sources.values())
    if found != 1:
        raise ValueError(f"{name}: expected {old!r} once in its source, found it {found} times; update the test")
    renamed = {module.__name__: f"changed_{module.__name__.rpartition('.')[2]}_for_{name}" for module in sources}
    for module, source in sources.items():
        changed = source.replace(old, new)
        for before, after in renamed.items():
            changed = changed.replace(before, after)
        made = _module(renamed[module.__name__], changed, folder)
        sys.modules[made.__name__] = made
    for after in renamed.values():
        del sys.modules[after]
    kernel: triton.JITFunction = getattr(made, name)
    return kernel


def _module(name: str, source: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
