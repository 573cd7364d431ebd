"""The tests of options and outputs refuse losses that lose one: their own test functions, run on broken losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_ce import LossOptions
from tests.support.broken_whole import BROKEN_WHOLE
from tests.support.subject import Subject
from tests.unit import test_log_probs_and_module as entries
from tests.unit import test_options as options
from tests.unit import test_outputs as outputs
from tests.unit import test_outputs_in_backward as backward
from tests.unit import test_whole_values as known

_SCALE = ("scale_dropped_in_statistics", "scale_dropped_in_gradient")
_SOFTCAP = ("softcap_dropped_in_statistics", "softcap_dropped_in_gradient", "softcap_slope_dropped")
_Z_LOSS = ("z_loss_dropped_in_loss", "z_loss_dropped_in_gradient")
_ENTROPY = ("entropy_gradient_dropped", "entropy_mean_term_dropped", "entropy_own_term_dropped")
_LOG_PROBS = ("log_probs_gradient_dropped", "log_probs_without_target")
_SHARDS = ("entropy_not_moved_to_the_max", "predictions_within_the_shard")
_CAPPED = LossOptions(softcap=2.0)

# Test function, its other arguments, the broken losses that it must refuse.
_CHECKS: list[tuple[Callable[..., None], dict[str, Any], tuple[str, ...]]] = [
    *(
        (options.test_two_values_give_two_losses, {"name": name, "entry": entry}, broken)
        for entry in options.LOSSES
        for name, broken in [
            ("scale", _SCALE),
            ("row_scale", _SCALE),
            ("softcap", _SOFTCAP),
            ("z_loss_weight", _Z_LOSS),
        ]
    ),
    (
        options.test_two_values_give_two_losses,
        {"name": "smoothing", "entry": "keywords"},
        ("smoothing_dropped_in_gradient",),
    ),
    (options.test_two_values_give_two_log_probs_and_entropies, {"name": "scale"}, (*_SCALE, *_LOG_PROBS[:1])),
    (options.test_two_values_give_two_log_probs_and_entropies, {"name": "row_scale"}, _SCALE),
    (options.test_two_values_give_two_log_probs_and_entropies, {"name": "softcap"}, (*_SOFTCAP, *_ENTROPY[:1])),
    (known.test_one_temperature_for_all, {"as_tensor": False}, _SCALE),
    (known.test_one_temperature_for_all, {"as_tensor": True}, _SCALE),
    (
        known.test_masked_columns_have_no_part_in_any_output,
        {"options": _CAPPED, "widths": (3, 0, 5)},
        (*_SOFTCAP, *_ENTROPY, *_LOG_PROBS, *_SHARDS),
    ),
    (
        known.test_masked_columns_have_no_part_in_any_output,
        {"options": LossOptions(z_loss_weight=0.1), "widths": (8,)},
        (*_Z_LOSS, "lse_gradient_dropped", "loss_gradient_dropped"),
    ),
    (known.test_special_values_stay_in_their_row, {"filler": math.inf, "softcap": 3.0}, (*_SOFTCAP, *_Z_LOSS)),
    (known.test_tanh_does_not_overflow, {}, _SOFTCAP),
    (known.test_an_entropy_bonus_of_a_confident_row, {}, _ENTROPY[:1]),
    (outputs.test_z_loss_is_its_part_of_the_loss, {}, _Z_LOSS[:1]),
    (backward.test_one_gradient_for_any_subset, {"used": 15}, (*_ENTROPY, *_LOG_PROBS)),
    (backward.test_separate_backwards_of_two_outputs, {}, ("loss_gradient_dropped", "entropy_gradient_dropped")),
    (backward.test_any_layout_of_the_gradients, {"layout": "expanded"}, (*_ENTROPY, *_LOG_PROBS)),
    (
        entries.test_log_probs_and_entropy_match_float64,
        {"dtype": torch.bfloat16, "used": "log_probs+entropy"},
        (*_SCALE, *_SOFTCAP, _ENTROPY[0], _LOG_PROBS[0]),
    ),
    (entries.test_a_policy_gradient_step, {}, (_ENTROPY[0], _LOG_PROBS[0])),
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
    twin: Subject, test: Callable[..., None], arguments: dict[str, Any], broken: str
) -> None:
    wrong = dataclasses.replace(twin, backend=BROKEN_WHOLE[broken][0](twin.backend))
    with pytest.raises(AssertionError):
        test(wrong, **arguments)
