"""Starts a kernel, from the second time on without asking Triton again which variant its arguments select.

Triton inspects every argument of every launch (28 us in 3.6). Here no argument is specialised: what the code of a
variant depends on are the dtypes, the constants and which arguments are None, so these find it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

# Contract a * b + c where the source says so, on every Triton version: its default changes in 3.10.
COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}

_MAX_GRID = 2**31 - 1

_variants: dict[tuple[Any, ...], CompiledKernel] = {}


# Found by identity; `_kept` is filled by the first launch.
@dataclasses.dataclass(slots=True, eq=False)
class Launch:
    """A launch but for its tensors, for tensors of one layout on one device.

    Attributes:
        device: index of the tensors' device, -1 for the CPU.
        dtypes: of those tensors whose dtype the caller chose, and None for one that is None.
        programs: of the grid.
        sizes, constants: the kernel's arguments after the tensors, in its order. Sizes that the kernel does not declare
            as 64 bits wide fit into 32; None: the kernel is compiled without that argument.
        num_warps: of a program.
        maxnreg: registers of a thread at the most; None: as the compiler likes.
    """

    device: int
    dtypes: tuple[torch.dtype | None, ...]
    programs: int
    sizes: tuple[int | float | None, ...]
    constants: tuple[Any, ...]
    num_warps: int
    maxnreg: int | None = None
    _kept: tuple[Any, ...] | None = None


def launch(kernel: triton.JITFunction, how: Launch, *tensors: Tensor | None) -> None:
    """Run `kernel` on the current stream of the tensors' device; a tensor that is None keeps its place.

    Raises:
        ValueError: more programs than a grid holds.
    """
    device, kept = how.device, how._kept
    # Triton launches on the current device.
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, how, *tensors)
    elif kept is None:
        _launch_first(kernel, how, tensors)
    elif not (knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls):
        # What `variant[programs, 1, 1](...)` does, but for what only a profiler's hooks need. Addresses instead of
        # tensors: Triton would ask the driver about each.
        run, function, metadata, stream, arguments = kept
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        run(how.programs, 1, 1, stream(device), function, metadata, None, None, None, *addresses, *arguments)
    else:
        _variants[_key(kernel, how)][how.programs, 1, 1](*tensors, *how.sizes, *how.constants)


def _launch_first(kernel: triton.JITFunction, how: Launch, tensors: tuple[Tensor | None, ...]) -> None:
    programs, arguments = how.programs, (*how.sizes, *how.constants)
    if programs > _MAX_GRID:
        raise ValueError(f"logits: expected at most {_MAX_GRID} tiles in one call, got {programs}; split the rows")
    variant = _variants.get(_key(kernel, how))
    if variant is None:
        limit = {} if how.maxnreg is None else {"maxnreg": how.maxnreg}
        variant = kernel[programs,](*tensors, *arguments, num_warps=how.num_warps, **limit, **COMPILE_OPTIONS)
        # The interpreter has no variants.
        if not isinstance(variant, CompiledKernel):
            return
        _variants[_key(kernel, how)] = variant
    else:
        variant[programs, 1, 1](*tensors, *arguments)
    how._kept = (variant.run, variant.function, variant.packed_metadata, driver.active.get_current_stream, arguments)


def _key(kernel: triton.JITFunction, how: Launch) -> tuple[Any, ...]:
    absent = tuple(size is None for size in how.sizes)
    return id(kernel), how.device, how.dtypes, absent, how.constants, how.num_warps, how.maxnreg
