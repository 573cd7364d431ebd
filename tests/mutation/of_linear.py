"""Faults of the linear loss."""

from __future__ import annotations

from tests.mutation.fault import LINEAR, UNIT, Fault

_VALUES, _KEEP = f"{UNIT}linear_values.py::test_", f"{UNIT}linear_keep.py::test_"
_WEIGHTS = f"{UNIT}linear_weights.py::test_"


def _fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(f"linear: {name}", f"{LINEAR}{file}.py", old, new, tests)


OF_LINEAR = (
    _fault(
        "one chunk of the vocabulary has no statistics",
        "vocabulary_walk",
        "    for number, columns in enumerate(chunks or (slice(0, 0),)):\n",
        "    for number, columns in enumerate(chunks[:-1] or (slice(0, 0),)):\n",
        f"{_VALUES}float64_is_float64_throughout",
    ),
    _fault(
        "one chunk of the vocabulary has no gradient",
        "vocabulary_walk",
        "    for number, columns in enumerate(chunks):\n",
        "    for number, columns in enumerate(chunks[:-1]):\n",
        f"{_VALUES}float64_is_float64_throughout",
    ),
    _fault(
        "the hidden states' gradient is that of the last chunk",
        "vocabulary_walk",
        "(add_product if number else set_product)(of_hidden, grad, batch.weight[columns])",
        "set_product(of_hidden, grad, batch.weight[columns])",
        f"{_VALUES}values_and_gradients_match_float64",
    ),
    _fault(
        "the hidden states' gradient is summed in their dtype",
        "vocabulary_walk",
        "hidden.new_empty(hidden.shape, dtype=sum_dtype(hidden.dtype)) if needed.hidden",
        "hidden.new_empty(hidden.shape) if needed.hidden",
        f"{_VALUES}many_chunks_are_summed_in_float32",
    ),
    _fault(
        "the kept chunks are taken for others",
        "vocabulary_walk",
        "logits = kept[number - len(chunks)] if is_kept else buffers.scratch(columns)\n        if not is_kept",
        "logits = kept[0] if is_kept else buffers.scratch(columns)\n        if not is_kept",
        f"{_VALUES}what_is_kept_changes_no_bit",
    ),
    _fault(
        "kept logits are overwritten though another backward may come",
        "nodes",
        "overwrites_kept = bool(kept) and not _graph_is_kept() and not _is_captured(saved)",
        "overwrites_kept = bool(kept)",
        f"{_KEEP}a_graph_that_is_kept_gives_the_same_again",
    ),
    _fault(
        "an interrupted backward is tried again on half a gradient",
        "nodes",
        'ctx.spoiled = "overwrites the logits it kept"',
        "pass",
        f"{_KEEP}an_interrupted_backward_tried_again_raises_or_is_right",
    ),
    _fault(
        "padding rows of the weight keep what was in memory",
        "weight_gradient",
        "        self._grad[real_rows:] = 0.0\n",
        "",
        f"{UNIT}linear_edges.py::test_padding_rows_of_the_weight_take_no_part",
    ),
    _fault(
        "the weight's gradient is that of the last tokens",
        "token_walk",
        "(add_product if number else set_product)(sums.weight[real], grad.t(), part.hidden)",
        "set_product(sums.weight[real], grad.t(), part.hidden)",
        f"{_WEIGHTS}long_sums_are_kept_in_float32",
    ),
    _fault(
        "the bias' gradient is that of the last tokens",
        "token_walk",
        "            sums.bias[real] += grad.sum(0, dtype=sums.bias.dtype)\n",
        "            sums.bias[real] = grad.sum(0, dtype=sums.bias.dtype)\n",
        f"{_WEIGHTS}tokens_and_columns_cut_anyhow",
    ),
    _fault(
        "long sums are kept in their dtype",
        "token_walk",
        "    dtype = sum_dtype(hidden.dtype)\n",
        "    dtype = hidden.dtype\n",
        f"{_WEIGHTS}long_sums_are_kept_in_float32",
    ),
    _fault(
        "token_weights are ignored",
        "weighted_node",
        "torch.where(is_counted, token_weights.reshape(-1).to(sum_dtype(hidden.dtype)), 0.0)",
        "torch.where(is_counted, torch.ones_like(token_weights.reshape(-1), dtype=sum_dtype(hidden.dtype)), 0.0)",
        f"{_WEIGHTS}values_and_gradients_match_float64",
    ),
    _fault(
        "ignored tokens count",
        "weighted_node",
        "        is_counted = target.reshape(-1).long() != call.problem.ignore_index\n",
        "        is_counted = torch.ones_like(target.reshape(-1), dtype=torch.bool)\n",
        f"{_WEIGHTS}weights_of_ignored_rows_add_nothing",
    ),
    _fault(
        "the gradients of weighted tokens lack that of the loss",
        "weighted_node",
        "            factor = grad_loss * rest\n",
        "            factor = rest\n",
        f"{_WEIGHTS}a_power_of_the_loss",
    ),
    _fault(
        "small token_weights lose the gradient's digits",
        "weighted_node",
        "        unit = _power_of_two(flat_weights)\n",
        "        unit = torch.ones_like(flat_weights.sum())\n",
        f"{_WEIGHTS}small_weights_leave_the_gradient_its_digits",
    ),
)
