"""Kernels with one passage of their source changed: what every check must refuse."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import triton

from te_ce.kernels import gradient, merge, rows, statistics
from tests.compiled.build import GRADIENT, MERGE, ROW_LOSS, STATISTICS

_MODULES: dict[str, ModuleType] = {
    STATISTICS: statistics,
    ROW_LOSS: statistics,
    MERGE: merge,
    GRADIENT: gradient,
}


def changed_kernel(name: str, old: str, new: str, folder: Path) -> triton.JITFunction:
    """The kernel `name` with `old`, which must occur once in its file or in that of row addresses, replaced by `new`.

    Args:
        folder: where the changed files are written; Triton reads a kernel's source from its file.
    """
    source, helper = inspect.getsource(_MODULES[name]), inspect.getsource(rows)
    if source.count(old) + helper.count(old) != 1:
        found = source.count(old) + helper.count(old)
        raise ValueError(f"{name}: expected {old!r} once in its source, found it {found} times; update the test")
    changed_rows = _module(f"changed_rows_for_{name}", helper.replace(old, new), folder)
    sys.modules[changed_rows.__name__] = changed_rows
    source = source.replace(old, new).replace(rows.__name__, changed_rows.__name__)
    try:
        kernel: triton.JITFunction = getattr(_module(f"changed_{name}", source, folder), name)
    finally:
        del sys.modules[changed_rows.__name__]
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
