"""Every check of the compiled kernels refuses a kernel that is wrong in the way that it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_ce.kernels import launch
from tests.compiled.build import GRADIENT, MERGE, STATISTICS, Case, compile_kernel, shipped
from tests.compiled.claims import check_fp_fusion, check_no_atomics, check_row_offsets, check_wide_accesses
from tests.compiled.resources import check_no_spills, check_registers, local_accesses_in_loops, resource_usage
from tests.compiled.variants import changed_kernel

USUAL = Case()


@pytest.fixture
def oversized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32,768 elements for 4 warps: 256 elements a thread, more than it has registers."""
    monkeypatch.setattr(launch, "STATISTICS_BLOCK", launch.BlockShape(32768, 4))


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
    # Compensated sums of 4096 lanes leave no room for a fifth program.
    compiled = shipped(STATISTICS, USUAL)
    with pytest.raises(AssertionError, match=r"expected at most 96 registers a thread, so that 5 programs fit"):
        check_registers(compiled, programs=5)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (STATISTICS, "tl.store(out_ptr, m)", "tl.atomic_max(out_ptr, m)"),
        (MERGE, "tl.store(loss_ptr + rows, loss, mask=mask_n)", "tl.atomic_add(loss_ptr, tl.sum(loss, axis=0))"),
        (
            GRADIENT,
            'tl.store(out_ptr + offs_v, grad.to(grad_logits_ptr.dtype.element_ty), mask=mask_v, cache_modifier=".cs")',
            'tl.atomic_add(out_ptr + offs_v, grad.to(grad_logits_ptr.dtype.element_ty), mask=mask_v, sem="relaxed")',
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
        # The bound that leaves out padding is of any divisibility, where that of the stored width is of 16.
        (STATISTICS, "mask=first + offs_v < n_columns", "mask=mask_v"),
        (GRADIENT, "mask_v = offs_v < n_columns", "mask_v = offs_v < real_columns"),
    ],
)
def test_a_mask_that_cuts_vectors_is_refused(name: str, old: str, new: str, tmp_path: Path) -> None:
    compiled = compile_kernel(name, USUAL, changed_kernel(name, old, new, tmp_path))
    with pytest.raises(AssertionError, match=rf"{name}: expected the accesses .* found .*\('ld', 2\): (33|16)"):
        check_wide_accesses(compiled)


def test_odd_rows_would_be_refused_as_aligned_ones() -> None:
    with pytest.raises(AssertionError, match="expected the accesses"):
        check_wide_accesses(shipped(GRADIENT, USUAL._replace(columns=50257)))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (STATISTICS, "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
        (MERGE, "rows = tl.program_id(0).to(tl.int64) * BLOCK_N", "rows = tl.program_id(0) * BLOCK_N"),
        (GRADIENT, "row = (tile // n_tiles).to(tl.int64)", "row = tile // n_tiles"),
        # One product among many.
        (GRADIENT, "outer_row * logits_stride_outer", "outer_row.to(tl.int32) * logits_stride_outer"),
    ],
)
def test_a_32_bit_row_offset_is_refused(name: str, old: str, new: str, tmp_path: Path) -> None:
    compiled = compile_kernel(name, USUAL, changed_kernel(name, old, new, tmp_path))
    with pytest.raises(AssertionError, match=rf"{name}: expected 64-bit row offsets, found .*_stride_outer'\] in i32"):
        check_row_offsets(compiled)


def test_a_stride_that_is_ignored_is_refused(tmp_path: Path) -> None:
    kernel = changed_kernel(GRADIENT, "outer_row * logits_stride_outer", "outer_row * n_columns", tmp_path)
    with pytest.raises(AssertionError, match=r"found none with \['logits_stride_outer'\]"):
        check_row_offsets(compile_kernel(GRADIENT, USUAL, kernel))


# Triton 3.9 warns, where the option is left out, that its default will change.
@pytest.mark.filterwarnings("ignore:.*DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("options", [{}, {"enable_fp_fusion": False}], ids=["left to the default", "off"])
@pytest.mark.parametrize("name", [STATISTICS, MERGE, GRADIENT])
def test_contraction_not_as_asked_for_is_refused(
    name: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "COMPILE_OPTIONS", options)
    compiled = compile_kernel(name, USUAL._replace(smoothing=True))
    with pytest.raises(AssertionError, match=f"{name}: expected enable_fp_fusion=True from the launcher"):
        check_fp_fusion(compiled, True)
    if options:
        check_fp_fusion(compiled, False)
