"""Where rows lie: their addresses, and the vectors and lines of memory that they begin in."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at_row(pointer, row, inner, stride_outer, stride_inner, HAS_INNER: tl.constexpr):
    """`pointer` advanced to a row: row i is (i // inner, i % inner)."""
    if HAS_INNER:
        outer_row, inner_row = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
        return pointer + outer_row * stride_outer + inner_row * stride_inner
    return pointer + row.to(tl.int64) * stride_outer


@triton.jit
def floor_to_line(pointer):
    """The start of the 128-byte line that `pointer` lies in, and how many elements lie before `pointer` there.

    Subtracting them, be they 0, is what tells the compiler that the result is aligned.
    """
    before = (pointer.to(tl.int64) % 128).to(tl.int32) // (pointer.dtype.element_ty.primitive_bitwidth // 8)
    return tl.multiple_of(pointer - before, 16), before


@triton.jit
def ceil_to_vector(pointer):
    """The first multiple of 16 bytes at or after `pointer`, and how many elements lie before it."""
    size: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    after = (pointer.to(tl.int64) % 16).to(tl.int32) // size
    before = (16 // size - after) % (16 // size)
    return tl.multiple_of(pointer + before, 16), before
