"""Faults of the autograd nodes, of who may overwrite what, of communication, reduction and checks."""

from __future__ import annotations

from tests.mutation.fault import INTERPRETED, RANKS, UNIT, Fault

_INPLACE, _BAD = f"{UNIT}inplace.py::test_", f"{UNIT}rows_ignored_and_bad.py::test_"


def _fault(
    name: str, file: str, old: str, new: str, *tests: str, environment: tuple[tuple[str, str], ...] = (), ranks: int = 1
) -> Fault:
    return Fault(name, f"te_ce/{file}.py", old, new, tests, environment, ranks)


AUTOGRAD = (
    _fault(
        "the gradient is not multiplied by that of the loss",
        "autograd",
        "        grads = OutputGrads(readable(grad_loss))\n",
        "        grads = OutputGrads(torch.ones_like(grad_loss))\n",
        f"{UNIT}upstream_gradient.py::test_masked_transposed_and_averaged_losses",
    ),
    _fault(
        "the first gradient of a sequence serves all of it",
        "autograd",
        "        grads = OutputGrads(readable(grad_loss))\n",
        "        grads = OutputGrads(readable(grad_loss[..., :1].expand_as(grad_loss)))\n",
        f"{UNIT}upstream_gradient.py::test_masked_transposed_and_averaged_losses",
    ),
    _fault(
        "logits are overwritten while somebody sees them",
        "ownership",
        "    return not graph_is_kept and counts.within(calibrated)\n",
        "    return not graph_is_kept\n",
        f"{_INPLACE}logits_that_somebody_keeps_are_untouched",
    ),
    _fault(
        "a retained graph counts for nothing",
        "ownership",
        "    return not graph_is_kept and counts.within(calibrated)\n",
        "    return counts.within(calibrated)\n",
        f"{_INPLACE}a_retained_graph_gives_the_same_gradient_again",
    ),
    _fault(
        "memory of others is overwritten",
        "ownership",
        '        if not storage.resizable() or (tensor.device.type == "cpu" and tensor.is_shared()):\n',
        "        if False:\n",
        f"{_INPLACE}memory_that_torch_does_not_own_is_untouched",
    ),
    _fault(
        "rows that share memory are overwritten",
        "autograd",
        " and not may_share_memory(logits)\n",
        "\n",
        f"{_INPLACE}overlapping_rows_are_not_overwritten",
    ),
    _fault(
        "the version of overwritten logits stays",
        "autograd",
        "    torch.autograd.graph.increment_version(logits)\n",
        "",
        f"{_INPLACE}true_makes_a_later_use_by_autograd_raise",
        f"{_INPLACE}an_interrupted_backward_is_not_repeated_on_half_a_gradient",
        environment=INTERPRETED,  # torch counts the writes of the twin by itself
    ),
    _fault(
        "a second backward finds its own gradient",
        "autograd",
        "    if ctx.is_overwritten:\n",
        "    if False:\n",
        "tests/faults/test_logits_interrupted.py",
    ),
    _fault(
        "a second derivative is a wrong number",
        "autograd",
        "    return forbid_second_derivative(grad_logits, logits, *(grad for grad in grads if grad is not None))\n",
        "    return grad_logits\n",
        f"{_INPLACE}the_gradient_cannot_be_differentiated_again",
    ),
    _fault(
        "Transformer Engine's loss has a second backward",
        "overwriting",
        "        ctx.is_done = True\n",
        "",
        f"{UNIT}transformer_engine_buffers.py::test_second_backward_raises",
    ),
)

COLLECTIVES = (
    _fault(
        "statistics are gathered from the last rank on",
        "collectives",
        "    return _all_gather(stats, group, ranks)\n",
        "    return _all_gather(stats, group, ranks).flip(0)\n",
        f"{RANKS}whole_loss.py::test_the_bits_of_one_rank",
        ranks=2,
    ),
    _fault(
        "every rank merges its own statistics first",
        "collectives",
        "    return _all_gather(stats, group, ranks)\n",
        "    return _all_gather(stats, group, ranks).roll(-dist.get_rank(group) * stats.shape[0], 0)\n",
        f"{RANKS}whole_loss.py::test_the_bits_of_one_rank",
        ranks=3,
    ),
    _fault(
        "statistics of the last rank are left out",
        "collectives",
        "    return _all_gather(stats, group, ranks)\n",
        "    return _all_gather(stats, group, ranks)[: -stats.shape[0]]\n",
        f"{RANKS}loss.py::test_known_smoothed_losses",
        ranks=2,
    ),
    _fault(
        "the hidden states' gradient is not summed over the ranks",
        "collectives",
        "        return PendingSum(partial, dist.all_reduce(partial, group=group, async_op=True), partial)\n",
        "        return PendingSum(partial, None, partial)\n",
        f"{RANKS}linear.py::test_ranks_match_float64",
        ranks=2,
    ),
    _fault(
        "the sequence is gathered from another rank on",
        "collectives",
        "_all_gather(hidden.contiguous(), group, ranks)\n",
        "_all_gather(hidden.contiguous(), group, ranks).roll(hidden.shape[0], 0)\n",
        f"{RANKS}linear.py::test_ranks_match_float64",
        ranks=2,
    ),
)

REDUCTION_AND_CHECKS = (
    _fault(
        "the mean counts ignored rows",
        "reduction",
        "(target.long() != ignore_index).sum().clamp(min=1)",
        "max(1, target.numel())",
        f"{_BAD}reductions_count_the_valid_rows_only",
    ),
    _fault(
        "an int32 target wraps in the mean",
        "reduction",
        "(target.long() != ignore_index)",
        "(target != ignore_index)",
        f"{_BAD}the_mean_counts_in_64_bits",
    ),
    _fault(
        "a mean of no rows is NaN",
        "reduction",
        ".clamp(min=1)",
        "",
        f"{_BAD}all_rows_ignored_is_zero",
    ),
    _fault(
        "a checked call does not raise",
        "call",
        "    if call.record is not None:\n",
        "    if False:\n",
        f"{UNIT}options.py::test_checked_targets_raise",
    ),
    _fault(
        "the check lets targets past the vocabulary through",
        "agreement",
        "    bad = ((flat < 0) | (flat >= problem.classes)) & ~is_ignored\n",
        "    bad = (flat < 0) & ~is_ignored\n",
        f"{UNIT}options.py::test_checked_targets_raise",
    ),
    _fault(
        "bad targets become the nearest class",
        "loss",
        "    check_targets(target, row_scale, call)\n",
        "    target = target.clamp(0, call.problem.classes - 1)\n    check_targets(target, row_scale, call)\n",
        f"{_BAD}checking_names_rank_row_and_value",
    ),
    _fault(
        "ranks with other options agree",
        "agreement",
        "    _raise_for_facts(records)\n",
        "",
        f"{UNIT}agreement.py::test_what_must_be_alike",
    ),
    _fault(
        "ranks with other targets agree",
        "agreement",
        "        if len(set(checksums)) > 1:\n",
        "        if False:\n",
        f"{UNIT}agreement.py::test_other_valid_targets_are_a_disagreement",
    ),
)

OF_AUTOGRAD = (*AUTOGRAD, *COLLECTIVES, *REDUCTION_AND_CHECKS)
