"""Starts a kernel, from the second time on without asking Triton again which variant its arguments select.

Triton inspects every argument of every launch (28 us in 3.6). Here no argument is specialised: what the code of a
variant depends on are the dtypes and the constants, so these find it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Launch(NamedTuple):
    """A launch but for its tensors.

    Attributes:
        programs: of the grid.
        sizes, constants: the kernel's arguments after the tensors, in its order. Sizes that the kernel does not declare
            as 64 bits wide fit into 32.
        num_warps: of a program.
    """

    programs: int
    sizes: tuple[int | float, ...]
    constants: tuple[Any, ...]
    num_warps: int


def launch(kernel: triton.JITFunction, tensors: tuple[Tensor, ...], how: Launch) -> None:
    """Run `kernel` on the device and current stream of the tensors.

    Raises:
        ValueError: more programs than a grid holds.
    """
    programs, sizes, constants, num_warps = how
    if programs > _MAX_GRID:
        raise ValueError(f"logits: expected at most {_MAX_GRID} tiles in one call, got {programs}; split the rows")
    device = tensors[0].get_device()
    key = (id(kernel), device, tensors[0].dtype, tensors[1].dtype, constants, num_warps)
    variant = _variants.get(key)
    # Triton launches on the current device.
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, tensors, how)
    elif variant is None:
        variant = kernel[programs,](*tensors, *sizes, *constants, num_warps=num_warps, **COMPILE_OPTIONS)
        # The interpreter has no variants.
        if isinstance(variant, CompiledKernel):
            _variants[key] = variant
    elif not (knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls):
        # What `variant[programs, 1, 1](...)` does, but for what only a profiler's hooks need.
        stream = driver.active.get_current_stream(device)
        run, function, metadata = variant.run, variant.function, variant.packed_metadata
        run(programs, 1, 1, stream, function, metadata, None, None, None, *tensors, *sizes, *constants)
    else:
        variant[programs, 1, 1](*tensors, *sizes, *constants)
