"""Every tolerance of the other test files refuses wrong answers: their own test functions, run on broken losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.broken import BROKEN, IMPRECISE
from tests.support.subject import Subject
from tests.unit import (
    test_inplace as inplace,
)
from tests.unit import (
    test_known_values as known,
)
from tests.unit import (
    test_layouts_and_sizes as layouts,
)
from tests.unit import (
    test_rows_ignored_and_bad as rows,
)
from tests.unit import (
    test_special_values as special,
)
from tests.unit import (
    test_upstream_gradient as upstream,
)

_GRADIENT = ("off_target_zeroed", "doubled_reduction", "target_shifted")
_LOSS = ("doubled_reduction", "target_shifted")
_OFFSET = {"offset": 1e6, "expected": 0.241311, "widths": (3,)}

# Test function, its other arguments, the broken losses that it must refuse. Off-target zeroes touch no loss; a shifted
# target changes nothing where all logits are equal.
_CHECKS: list[tuple[Callable[..., None], dict[str, Any], tuple[str, ...]]] = [
    (
        known.test_smoothing_counts_the_whole_vocabulary,
        {"smoothing": "others", "expected": [3.542936, 2.805376, 1.811026], "widths": (4, 4)},
        (*_GRADIENT, "smoothing_over_the_shard"),
    ),
    (
        known.test_smoothing_counts_the_whole_vocabulary,
        {"smoothing": "uniform", "expected": [3.561686, 2.812072, 1.802098], "widths": (3, 0, 5)},
        (*_GRADIENT, "smoothing_over_the_shard"),
    ),
    (known.test_ranks_without_the_target_get_their_softmax, {}, _GRADIENT),
    (known.test_true_class_is_rounded_once, {"p": 0.998999, "logit": 13.8125}, (*_LOSS, "softmax_rounded_first")),
    (known.test_smoothed_true_class_is_rounded_once, {}, (*_GRADIENT, "softmax_rounded_first")),
    (known.test_bfloat16_and_the_same_values_in_float32_agree, {}, ("statistics_in_the_logits_dtype",)),
    (known.test_common_offsets_cost_no_precision, _OFFSET, (*_LOSS, "through_a_rounded_lse")),
    (known.test_common_offsets_cost_no_precision, {**_OFFSET, "offset": 1e4}, ("through_a_rounded_lse",)),
    (known.test_an_exact_offset_changes_nothing, {"alpha": 0.0}, ("through_a_rounded_lse",)),
    (known.test_float16_sums_are_made_in_float32, {}, (*_LOSS[:1], "statistics_in_the_logits_dtype")),
    (known.test_float16_mean_of_many_rows_does_not_overflow, {}, _LOSS),
    (known.test_lanes_past_the_last_column_take_no_part, {"columns": 130, "value": -30.0}, ("doubled_reduction",)),
    (known.test_classifier_gradients_match_float64, {}, _GRADIENT),
    (upstream.test_any_layout_of_the_gradient, {"layout": lambda g: g}, _GRADIENT),
    (upstream.test_masked_transposed_and_averaged_losses, {}, _GRADIENT),
    (upstream.test_a_masked_first_row_masks_no_other, {}, _GRADIENT),
    (upstream.test_one_row_and_a_single_one, {}, _GRADIENT),
    (rows.test_reductions_count_the_valid_rows_only, {"alpha": 0.0, "reduction": "mean"}, _GRADIENT),
    (rows.test_reductions_count_the_valid_rows_only, {"alpha": 0.2, "reduction": "none"}, _GRADIENT),
    (rows.test_value_of_a_smoothed_mean, {}, _LOSS),
    (rows.test_any_integer_can_be_ignored, {"ignore_index": 0}, _LOSS),
    (
        special.test_masked_logits_have_no_probability,
        {"row": [-math.inf, 1.0, -math.inf, 2.0, -math.inf, 3.0, -math.inf, 4.0], "target": 1, "widths": (4, 4)},
        _GRADIENT,
    ),
    (special.test_blocks_of_masked_logits, {}, _GRADIENT),
    (special.test_as_torch_and_for_that_row_alone, {"row": [math.inf] * 8, "alpha": 0.1, "widths": (4, 4)}, _GRADIENT),
    (special.test_a_masked_target_costs_infinity, {"alpha": 0.0}, _GRADIENT),
    (special.test_extreme_finite_logits, {}, _LOSS),
    (layouts.test_any_strides, {"layout": "transposed", "target_layout": "strided"}, _GRADIENT),
    (inplace.test_dropped_logits_are_taken_over, {"dtype": torch.bfloat16, "shape": (6, 32)}, _GRADIENT),
    (inplace.test_two_losses_on_the_same_logits, {}, _GRADIENT),
    (inplace.test_a_loss_beside_another_use_of_the_logits, {"dtype": torch.float32}, _GRADIENT),
    (inplace.test_a_loss_beside_another_use_of_the_logits, {"dtype": torch.bfloat16}, _GRADIENT),
    (inplace.test_expanded_logits, {}, _GRADIENT),
]


@pytest.mark.parametrize(
    ("test", "arguments", "broken"),
    [
        pytest.param(test, arguments, name, id=f"{test.__name__}-{number}-{name}")
        for number, (test, arguments, names) in enumerate(_CHECKS)
        for name in names
    ],
)
def test_a_broken_loss_is_refused(
    subject: Subject, test: Callable[..., None], arguments: dict[str, Any], broken: str
) -> None:
    make = BROKEN.get(broken) or IMPRECISE[broken]
    wrong = dataclasses.replace(subject, backend=make(subject.backend))
    with pytest.raises(AssertionError):
        test(wrong, **arguments)
