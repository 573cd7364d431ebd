"""Every check of the compiled kernels refuses a kernel that is wrong in the way that it looks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from te_ce.kernels import launcher, shapes
from tests.compiled.build import GRADIENT, MERGE, ROW_LOSS, STATISTICS, Case, compile_kernel, shipped
from tests.compiled.claims import check_fp_fusion, check_no_atomics, check_row_offsets, check_wide_accesses
from tests.compiled.resources import (
    check_no_spills,
    check_registers,
    check_spills_are_rare,
    local_accesses_in_loops,
    resource_usage,
)
from tests.compiled.variants import changed_kernel

USUAL = Case()


@pytest.fixture
def oversized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 256 elements a thread, more than it has registers."""
    monkeypatch.setattr(shapes, "WALK_16_BIT", shapes.WalkShape(32, 4))
    shapes.walk_plan.cache_clear()
    yield
    shapes.walk_plan.cache_clear()


@pytest.mark.usefixtures("oversized")
def test_a_block_too_wide_is_refused() -> None:
    compiled = compile_kernel(STATISTICS, USUAL)
    assert resource_usage(compiled).stack > 0
    assert local_accesses_in_loops(compiled)
    with pytest.raises(AssertionError, match=r"row_statistics_kernel: expected at most 0 bytes of stack"):
        check_no_spills(compiled)
    with pytest.raises(AssertionError, match=r"expected no spills inside a loop, found"):
        check_no_spills(compiled, outside_loops=1 << 20)


def test_too_many_registers_are_refused() -> None:
    # A second sum a thread leaves no room for 64 warps.
    compiled = shipped(STATISTICS, USUAL._replace(smoothing=True))
    with pytest.raises(AssertionError, match=r"expected at most 32 registers a thread, so that 16 programs fit"):
        check_registers(compiled, programs=16)


def test_spills_of_the_usual_tile_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "ENTROPY_REGISTERS", {90: 24})
    compiled = compile_kernel(GRADIENT, USUAL._replace(outputs=("entropy",)))
    with pytest.raises(AssertionError, match=r"logits_gradient_kernel: expected .* 16 exponentials after the last"):
        check_spills_are_rare(compiled, elements=16, stack=1 << 20)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (STATISTICS, "tl.store(out_ptr, m, mask=mask)", "tl.atomic_max(out_ptr, m)"),
        (MERGE, "tl.store(loss_ptr + rows, loss, mask=mask_n)", "tl.atomic_add(loss_ptr, tl.sum(loss, axis=0))"),
        (
            GRADIENT,
            "tl.store(out_ptr + offs, grad.to(out_ptr.dtype.element_ty), mask=mask)",
            'tl.atomic_add(out_ptr + offs, grad.to(out_ptr.dtype.element_ty), mask=mask, sem="relaxed")',
        ),
    ],
)
def test_an_atomic_is_refused(name: str, old: str, new: str, tmp_path: Path) -> None:
    compiled = compile_kernel(name, USUAL, changed_kernel(name, old, new, tmp_path))
    with pytest.raises(AssertionError, match=rf"{name}: expected no atomics, found \['(atom|red)\."):
        check_no_atomics(compiled)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (STATISTICS, "offs < (stop - first) // VEC * ITEMS", "offs < (stop - first) // 3"),
        (GRADIENT, "(offs < (end // VEC) * VEC)", "(offs < end)"),
    ],
)
def test_a_mask_that_cuts_vectors_is_refused(name: str, old: str, new: str, tmp_path: Path) -> None:
    compiled = compile_kernel(name, USUAL, changed_kernel(name, old, new, tmp_path))
    with pytest.raises(AssertionError, match=rf"{name}: expected the accesses .* found .*\('ld', [24]\): (1[67]|[89])"):
        check_wide_accesses(compiled)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (STATISTICS, "pointer + row.to(tl.int64) * stride_outer", "pointer + row * stride_outer.to(tl.int32)"),
        (ROW_LOSS, "pointer + row.to(tl.int64) * stride_outer", "pointer + row * stride_outer.to(tl.int32)"),
        (GRADIENT, "pointer + row.to(tl.int64) * stride_outer", "pointer + row * stride_outer.to(tl.int32)"),
    ],
)
def test_a_32_bit_row_offset_is_refused(name: str, old: str, new: str, tmp_path: Path) -> None:
    compiled = compile_kernel(name, USUAL, changed_kernel(name, old, new, tmp_path))
    with pytest.raises(AssertionError, match=rf"{name}: expected 64-bit row offsets, found .*_stride_outer'\] in i32"):
        check_row_offsets(compiled)


def test_a_stride_that_is_ignored_is_refused(tmp_path: Path) -> None:
    old = "at_row(logits_ptr, row, inner, logits_stride_outer"
    kernel = changed_kernel(GRADIENT, old, "at_row(logits_ptr, row, inner, n_columns.to(tl.int64)", tmp_path)
    with pytest.raises(AssertionError, match=r"found none with \['logits_stride_outer'\]"):
        check_row_offsets(compile_kernel(GRADIENT, USUAL, kernel))


# Triton 3.9 warns, where the option is left out, that its default will change.
@pytest.mark.filterwarnings("ignore:.*DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("options", [{}, {"enable_fp_fusion": False}], ids=["left to the default", "off"])
@pytest.mark.parametrize("name", [STATISTICS, ROW_LOSS, MERGE, GRADIENT])
def test_contraction_not_as_asked_for_is_refused(
    name: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "COMPILE_OPTIONS", options)
    compiled = compile_kernel(name, USUAL._replace(smoothing=True))
    with pytest.raises(AssertionError, match=f"{name}: expected enable_fp_fusion=True from the launcher"):
        check_fp_fusion(compiled, True)
    if options:
        check_fp_fusion(compiled, False)
