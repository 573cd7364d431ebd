"""Faults of the plain-torch twin."""

from __future__ import annotations

from tests.mutation.fault import TWIN, UNIT, Fault

_BAD = f"{UNIT}rows_ignored_and_bad.py::test_"
_KNOWN = f"{UNIT}known_values.py::test_"


def _fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(f"twin: {name}", f"{TWIN}{file}.py", old, new, tests)


OF_TWIN = (
    _fault(
        "no max is subtracted",
        "statistics",
        "    from_max = u.sub_(_finite_or_zero(m)[:, None])\n",
        "    m.zero_()\n    from_max = u\n",
        f"{_KNOWN}common_offsets_cost_no_precision",
    ),
    _fault(
        "-inf - -inf",
        "statistics",
        "    return torch.where(m == -torch.inf, 0.0, m)\n",
        "    return m\n",
        f"{UNIT}special_values.py::test_masked_logits_have_no_probability",
    ),
    _fault(
        "a tie goes to the larger id",
        "statistics",
        "(problem.start + first + u.argmax(-1))",
        "(problem.start + first + columns - 1 - u.flip(-1).argmax(-1))",
        f"{UNIT}outputs.py::test_predictions_are_the_smaller_of_equals",
    ),
    _fault(
        "a reproducible block begins a column early",
        "statistics",
        "            first = part * problem.block\n",
        "            first = max(0, part * problem.block - 1)\n",
        f"{UNIT}reproducible_tp.py::test_padding_changes_no_bit",
    ),
    _fault(
        "what a scaled difference loses by rounding is not put back",
        "statistics",
        "    return exp.addcmul_(exp, product.sub_(rounded).nan_to_num_(0.0, 0.0, 0.0).to(x.dtype))\n",
        "    return exp\n",
        f"{UNIT}scale_precision.py::test_equal_terms_do_not_all_round_to_one_side",
    ),
    _fault(
        "one rank's sum is dropped",
        "merge",
        "        d = d + weight[part] * gathered[part, 1]\n",
        "        d = d + weight[part] * gathered[part, 1] * (part != 1)\n",
        f"{_KNOWN}ranks_without_the_target_get_their_softmax",
    ),
    _fault(
        "smoothing over the shard's vocabulary",
        "merge",
        "(log_d - s / problem.classes)",
        "(log_d - s / problem.real_columns)",
        f"{_KNOWN}smoothing_counts_the_whole_vocabulary",
    ),
    _fault(
        "an empty shard makes NaN of the smoothed sum",
        "merge",
        "torch.where(columns > 0, columns * shift, 0.0)",
        "columns * shift",
        f"{UNIT}linear_combine.py::test_parts_that_are_minus_infinity",
    ),
    _fault(
        "a bad target gives a number",
        "merge",
        "    value = torch.where(is_class(target, problem), value, torch.nan)\n",
        "",
        f"{_BAD}padding_ids_are_bad_targets",
    ),
    _fault(
        "a bad target gets a gradient",
        "gradient",
        "        grad[~is_class(y, problem)] = torch.nan\n",
        "",
        f"{_BAD}a_bad_target_makes_its_row_nan_and_no_other",
    ),
    _fault(
        "ignored rows get a gradient",
        "gradient",
        "        grad[y == problem.ignore_index] = 0.0\n",
        "",
        f"{_BAD}ignored_rows_are_zero_whatever_they_hold",
    ),
    _fault(
        "padding is left as it was",
        "gradient",
        "        part[..., problem.real_columns :] = 0.0\n",
        "",
        f"{_KNOWN}padding_columns_take_no_part_whatever_they_hold",
    ),
    _fault(
        "the target of another shard is this one's column 0",
        "gradient",
        "torch.where(owned, -of.b, -0.0)",
        "-of.b",
        f"{_KNOWN}ranks_without_the_target_get_their_softmax",
    ),
    _fault(
        "a shard takes the next one's first class for its own",
        "rows",
        "(target < problem.start + problem.real_columns)",
        "(target <= problem.start + problem.real_columns)",
        f"{_KNOWN}the_neighbour_of_a_shard_is_not_its_own",
    ),
    _fault(
        "the gradient is rounded before softcap and scale, too",
        "gradient",
        "        grad = _shard_gradient(u, y, upstream, of_rows, problem, scale)\n",
        "        grad = _shard_gradient(u, y, upstream, of_rows, problem, scale).to(logits.dtype).to(saved.dtype)\n",
        f"{UNIT}whole_loss.py::test_values_and_gradient_match_float64",
    ),
    _fault(
        "the softcap's slope is lost",
        "gradient",
        "            grad *= tanh.square_().neg_().add_(1.0)\n",
        "            grad *= 1.0\n",
        f"{UNIT}gradcheck.py::test_loss_and_outputs",
    ),
    _fault(
        "the gradient lacks the scale",
        "gradient",
        "            grad *= problem.scale\n",
        "            grad *= 1.0\n",
        f"{UNIT}gradcheck.py::test_loss_and_outputs",
    ),
)
