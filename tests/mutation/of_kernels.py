"""Faults of the kernels, noticed in Triton's interpreter or in the code that Triton compiles."""

from __future__ import annotations

from tests.mutation.fault import INTERPRETED, KERNELS, UNIT, Fault

_STORE = "    tl.store(out_ptr + offs, grad.to(out_ptr.dtype.element_ty), mask=mask)\n    if HAS_EDGES"
_GRADIENT, _FORWARD = f"{UNIT}kernel_gradient.py::test_", f"{UNIT}kernel_forward.py::test_"


def _fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, f"{KERNELS}{file}.py", old, new, tests, INTERPRETED)


STATISTICS = (
    _fault(
        "no max is subtracted",
        "walk",
        "    x = u - base[None, :, None]\n",
        "    x = u\n",
        f"{_FORWARD}widths_and_dtypes",
    ),
    _fault(
        "the max is that of the last block",
        "walk",
        "    new_m = tl.maximum(m, block_m)\n",
        "    new_m = block_m\n",
        f"{_FORWARD}widths_and_dtypes",
    ),
    _fault(
        "-inf - -inf in a running max",
        "walk",
        '    base = tl.where(new_r == -float("inf"), 0.0, new_r)\n',
        "    base = new_r\n",
        f"{_FORWARD}columns_of_minus_infinity",
    ),
    _fault(
        "what a sum loses by rounding is not put back",
        "walk",
        "    lost = (raised - d) - term\n",
        "    lost = tl.zeros_like(d)\n",
        f"{UNIT}known_values.py::test_confident_rows_keep_the_bound",
    ),
    _fault(
        "a lane past the last whole vector counts",
        "walk",
        "    mask = at + block_positions(UNROLL, THREADS, VEC) < stop\n",
        "    mask = at + block_positions(UNROLL, THREADS, VEC) <= stop\n",
        f"{_FORWARD}rows_anywhere_in_a_vector",
    ),
    _fault(
        "a column past the end of a row counts",
        "walk",
        "    in_tail = (lane >= VEC) & (after < real_columns)\n",
        "    in_tail = (lane >= VEC) & (after <= real_columns)\n",
        f"{_FORWARD}rows_anywhere_in_a_vector",
    ),
    _fault(
        "a shard takes the next one's first class for its own",
        "walk",
        "    owned = (part == 0) & (target >= start) & (target < start + real_columns)\n",
        "    owned = (part == 0) & (target >= start) & (target <= start + real_columns)\n",
        f"{UNIT}known_values.py::test_the_neighbour_of_a_shard_is_not_its_own",
    ),
    _fault(
        "a tie goes to the later block",
        "walk",
        "        best_at = tl.where(block_m > best, at, best_at)\n",
        "        best_at = tl.where(block_m >= best, at, best_at)\n",
        f"{_FORWARD}equal_maxima_give_the_first_of_them",
    ),
    _fault(
        "a column past a reproducible block counts",
        "blocks",
        "    mask = offs < count - offs_t[None, :, None]\n",
        "    mask = offs <= count - offs_t[None, :, None]\n",
        f"{UNIT}reproducible_tp.py::test_padding_changes_no_bit",
    ),
    _fault(
        "padding lanes are masked before the softcap",
        "transform",
        '        x = tl.where(mask, x, -float("inf"))\n',
        "",
        f"{UNIT}whole_values.py::test_padding_lanes_are_masked_after_the_softcap",
    ),
    _fault(
        "the entropy of a masked column is NaN",
        "entropy",
        "    return clamped(x, scale) * exp\n",
        "    return x * exp\n",
        f"{_FORWARD}columns_of_minus_infinity",
    ),
    Fault(
        "offsets of rows have 32 bits",
        f"{KERNELS}rows.py",
        "pointer + row.to(tl.int64) * stride_outer",
        "pointer + row * stride_outer.to(tl.int32)",
        ("tests/compiled/test_compiled_kernels.py::test_row_offsets_are_64_bit",),
    ),
)

MERGE = (
    _fault(
        "the kernel drops the last rank",
        "merge",
        "    for _ in range(n_parts):\n        m_part = ",
        "    for _ in range(n_parts - 1):\n        m_part = ",
        f"{UNIT}linear_combine.py::test_columns_are_counted",
    ),
    _fault(
        "an empty shard makes NaN of the smoothed sum",
        "merge",
        "shift = tl.where(columns > 0.0, columns * (m_part - m), 0.0)",
        "shift = columns * (m_part - m)",
        f"{UNIT}linear_combine.py::test_parts_that_are_minus_infinity",
    ),
    _fault(
        "ties between shards go to the larger id",
        "merge",
        "            argmax = tl.minimum(argmax, tl.where(m_part == m, column, NO_COLUMN))\n",
        "            argmax = tl.where(m_part == m, column, argmax)\n",
        f"{UNIT}linear_combine.py::test_ties_go_to_the_smallest_id",
    ),
    _fault(
        "sums of shards are added whatever their max",
        "merge",
        "        d += weight * d_part\n",
        "        d += d_part\n",
        f"{UNIT}linear_combine.py::test_combined_first_and_then_merged",
    ),
    _fault(
        "a shard without a finite logit is no identity",
        "combine",
        "    d = tl.where(is_empty, d_without_max, d)\n",
        "",
        f"{UNIT}linear_combine.py::test_parts_that_are_minus_infinity",
    ),
    _fault(
        "the loss goes through a rounded lse",
        "numerics",
        "    loss = log_d - from_max\n",
        "    loss = (m + log_d) - (m + from_max)\n",
        f"{UNIT}known_values.py::test_common_offsets_cost_no_precision",
    ),
    _fault(
        "a bad target gives a number",
        "numerics",
        '    value = tl.where((target >= 0) & (target < classes), value, float("nan"))\n',
        "",
        f"{UNIT}rows_ignored_and_bad.py::test_padding_ids_are_bad_targets",
    ),
)

GRADIENT = (
    _fault(
        "last columns of a row are not stored",
        "gradient",
        "mask = in_head | ((lane >= VEC) & (after < end))",
        "mask = in_head | ((lane >= VEC) & (after < end - 1))",
        f"{_GRADIENT}widths_and_dtypes",
    ),
    _fault(
        "ignored rows get no store",
        "gradient",
        _STORE,
        _STORE.replace("mask=mask", "mask=mask & (target != ignore_index)"),
        f"{UNIT}rows_ignored_and_bad.py::test_ignored_rows_are_zero_whatever_they_hold",
    ),
    _fault(
        "the true class is rounded twice",
        "coefficients",
        "tl.where(column == target_column, grad - of_target, grad)",
        "tl.where(column == target_column, grad.to(x.dtype).to(tl.float32) - of_target, grad)",
        f"{UNIT}known_values.py::test_true_class_is_rounded_once",
    ),
    _fault(
        "the target of another shard matches a column of this one",
        "gradient",
        "at = tl.where((target >= start) & (target < start + real_columns), target - start, -1).to(tl.int32)",
        "at = (target % tl.maximum(real_columns, 1)).to(tl.int32)",
        f"{UNIT}known_values.py::test_ranks_without_the_target_get_their_softmax",
    ),
    _fault(
        "padding gets a gradient",
        "coefficients",
        "        grad = tl.where(column < real_columns, grad, 0.0)\n",
        "        grad = tl.where(column <= real_columns, grad, 0.0)\n",
        f"{UNIT}known_values.py::test_padding_columns_take_no_part_whatever_they_hold",
    ),
    _fault(
        "the softcap's slope is lost",
        "coefficients",
        "        grad *= (1.0 - tanh) * (1.0 + tanh)\n",
        "        grad *= 1.0\n",
        f"{_GRADIENT}options",
    ),
    _fault(
        "the gradient lacks the scale",
        "coefficients",
        "        g = _row_value(grad_loss, row, inner, HAS_INNER) * of_all\n",
        "        g = _row_value(grad_loss, row, inner, HAS_INNER)\n",
        f"{_GRADIENT}a_scale_of_each_row",
    ),
    _fault(
        "the upstream gradient of the first row serves all",
        "coefficients",
        "    return tl.load(at_row(strided[0], row, inner, strided[1], strided[2], HAS_INNER)).to(tl.float32)",
        "    return tl.load(at_row(strided[0], row * 0, inner, strided[1], strided[2], HAS_INNER)).to(tl.float32)",
        f"{UNIT}upstream_gradient.py::test_a_masked_first_row_masks_no_other",
    ),
    _fault(
        "the z-loss has half its gradient",
        "coefficients",
        "of_exp = g * (1.0 + lse_weight * (m + tl.log(d)))",
        "of_exp = g * (1.0 + 0.5 * lse_weight * (m + tl.log(d)))",
        f"{_GRADIENT}options",
    ),
    _fault(
        "a bad target gets a gradient",
        "coefficients",
        '    of_exp = tl.where(is_class, of_exp, float("nan")) / d\n',
        "    of_exp = of_exp / d\n",
        f"{_GRADIENT}rows_that_have_no_probabilities",
    ),
    _fault(
        "the last number of a scaled copy is not written",
        "scaling",
        "        mask = offs < n_elements - first\n",
        "        mask = offs < n_elements - first - 1\n",
        f"{UNIT}linear_combine.py::test_a_scaled_copy_is_rounded_once",
    ),
)

OF_KERNELS = (*STATISTICS, *MERGE, *GRADIENT)
