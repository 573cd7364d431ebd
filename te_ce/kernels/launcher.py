"""Starts a kernel, from the second time on without asking Triton again which variant its arguments select.

Triton inspects every argument of every launch (28 us in 3.6). Here no argument is specialised: what the code of a
variant depends on are the dtypes and the constants, so these find it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

# Contract a * b + c where the source says so, on every Triton version: its default changes in 3.10.
COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}

_MAX_GRID = 2**31 - 1

_variants: dict[tuple[Any, ...], CompiledKernel] = {}


def launch(
    kernel: triton.JITFunction,
    programs: int,
    tensors: tuple[Tensor, ...],
    sizes: tuple[int | float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
) -> None:
    """Run `programs` programs of `kernel` on the device and stream of the tensors.

    Args:
        tensors, sizes, constants: the kernel's arguments, in its order. `sizes` that the kernel does not declare as 64
            bits wide fit into 32.
        num_warps: of a program.

    Raises:
        ValueError: more programs than a grid holds.
    """
    if programs > _MAX_GRID:
        raise ValueError(f"logits: expected at most {_MAX_GRID} tiles in one call, got {programs}; split the rows")
    device = tensors[0].get_device()
    key = (id(kernel), device, tensors[0].dtype, tensors[1].dtype, constants, num_warps)
    variant = _variants.get(key)
    with _on_device(device):
        if variant is not None:
            variant[programs, 1, 1](*tensors, *sizes, *constants)
            return
        variant = kernel[programs,](*tensors, *sizes, *constants, num_warps=num_warps, **COMPILE_OPTIONS)
    # The interpreter has no variants.
    if isinstance(variant, CompiledKernel):
        _variants[key] = variant


def _on_device(device: int) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device; switch only where that is another one."""
    if device >= 0 and device != torch.cuda.current_device():
        return torch.cuda.device(device)
    return _NOTHING


_NOTHING = contextlib.nullcontext()
