"""A float32 sum times one number, rounded once to fewer bits: torch's own product of these dtypes is not vectorised."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_elements"])
def scaled_copy_kernel(
    # inputs
    total_ptr,  # [n_elements] float32
    factor_ptr,  # [] float32
    # output
    out_ptr,  # [n_elements] float32, bfloat16 or float16
    # size
    n_elements: tl.int64,
    # constant
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offs = tl.arange(0, BLOCK)
    total_ptr += first
    out_ptr += first
    factor = tl.load(factor_ptr)
    # A mask whose bound is not known to be a multiple of the vector width would split every access.
    if n_elements - first >= BLOCK:
        scaled = tl.load(total_ptr + offs, cache_modifier=".cg") * factor
        tl.store(out_ptr + offs, scaled.to(out_ptr.dtype.element_ty), cache_modifier=".cs")
    else:
        mask = offs < n_elements - first
        scaled = tl.load(total_ptr + offs, mask=mask) * factor
        tl.store(out_ptr + offs, scaled.to(out_ptr.dtype.element_ty), mask=mask)
