"""Kernels with one passage of their source changed: what every check must refuse."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import triton

from te_ce.kernels import gradient, merge, statistics
from tests.compiled.build import GRADIENT, MERGE, STATISTICS

_MODULES: dict[str, ModuleType] = {STATISTICS: statistics, MERGE: merge, GRADIENT: gradient}


def changed_kernel(name: str, old: str, new: str, folder: Path) -> triton.JITFunction:
    """The kernel `name` with `old`, which must occur once in its file, replaced by `new`.

    Args:
        folder: where the changed file is written; Triton reads a kernel's source from its file.
    """
    source = inspect.getsource(_MODULES[name])
    if source.count(old) != 1:
        raise ValueError(
            f"{name}: expected {old!r} once in its source, found it {source.count(old)} times; update the test"
        )
    path = folder / f"changed_{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel: triton.JITFunction = getattr(module, name)
    return kernel
