"""The faults: a text that occurs once in a file, what it becomes, and the tests that are to notice."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One fault.

    Attributes:
        what: of it, for people.
        tests: files or node ids, which pass without it.
        ranks: that the tests run on; 1: no torchrun.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str
    ranks: int = 1


_UNIT, _RANKS, _MEGATRON = "tests/unit/test_", "tests/distributed/test_", "tests/megatron/test_megatron_"
_KERNELS, _TWIN, _LINEAR = "te_ce/kernels/", "te_ce/reference/", "te_ce/linear/"
_GRADIENT, _FORWARD, _WHOLE = f"{_UNIT}kernel_gradient.py", f"{_UNIT}kernel_forward.py", f"{_UNIT}whole_loss.py"

FAULTS = (
    # Kernels, in Triton's interpreter.
    Fault(
        "last columns of a row are not stored",
        f"{_KERNELS}gradient.py",
        "mask = in_head | ((lane >= VEC) & (after < end))",
        "mask = in_head | ((lane >= VEC) & (after < end - 1))",
        _GRADIENT,
    ),
    Fault(
        "ignored rows get no store",
        f"{_KERNELS}gradient.py",
        "    tl.store(out_ptr + offs, grad.to(out_ptr.dtype.element_ty), mask=mask)\n    if HAS_EDGES",
        "    tl.store(out_ptr + offs, grad.to(out_ptr.dtype.element_ty), mask=mask & (target != ignore_index))\n"
        "    if HAS_EDGES",
        _GRADIENT,
    ),
    Fault(
        "the gradient is rounded twice",
        f"{_KERNELS}gradient.py",
        "    tl.store(out_ptr + offs, grad.to(out_ptr.dtype.element_ty), mask=mask)\n    if HAS_EDGES",
        "    grad = grad.to(tl.bfloat16).to(tl.float32)\n"
        "    tl.store(out_ptr + offs, grad.to(out_ptr.dtype.element_ty), mask=mask)\n    if HAS_EDGES",
        _GRADIENT,
    ),
    Fault(
        "the target of another shard matches a column of this one",
        f"{_KERNELS}gradient.py",
        "at = tl.where((target >= start) & (target < start + real_columns), target - start, -1).to(tl.int32)",
        "at = (target % tl.maximum(real_columns, 1)).to(tl.int32)",
        _WHOLE,
    ),
    Fault(
        "padding gets a gradient",
        f"{_KERNELS}coefficients.py",
        "        grad = tl.where(column < real_columns, grad, 0.0)\n",
        "        grad = tl.where(column <= real_columns, grad, 0.0)\n",
        _WHOLE,
    ),
    Fault(
        "the softcap's slope is lost",
        f"{_KERNELS}coefficients.py",
        "        grad *= (1.0 - tanh) * (1.0 + tanh)\n",
        "        grad *= 1.0\n",
        _WHOLE,
    ),
    Fault(
        "the upstream gradient of the first row serves all",
        f"{_KERNELS}coefficients.py",
        "    return tl.load(at_row(strided[0], row, inner, strided[1], strided[2], HAS_INNER)).to(tl.float32)",
        "    return tl.load(at_row(strided[0], row * 0, inner, strided[1], strided[2], HAS_INNER)).to(tl.float32)",
        _GRADIENT,
    ),
    Fault(
        "the z-loss has half its gradient",
        f"{_KERNELS}coefficients.py",
        "of_exp = g * (1.0 + lse_weight * (m + tl.log(d)))",
        "of_exp = g * (1.0 + 0.5 * lse_weight * (m + tl.log(d)))",
        _WHOLE,
    ),
    Fault(
        "the loss goes through a rounded lse",
        f"{_KERNELS}numerics.py",
        "    loss = log_d - from_max\n",
        "    loss = (m + log_d) - (m + from_max)\n",
        _WHOLE,
    ),
    Fault(
        "a bad target gives a number",
        f"{_KERNELS}numerics.py",
        '    value = tl.where((target >= 0) & (target < classes), value, float("nan"))\n',
        "",
        _FORWARD,
    ),
    Fault(
        "an empty shard makes NaN of the smoothed sum",
        f"{_KERNELS}merge.py",
        "shift = tl.where(columns > 0.0, columns * (m_part - m), 0.0)",
        "shift = columns * (m_part - m)",
        _WHOLE,
    ),
    Fault(
        "ties go to the larger id",
        f"{_KERNELS}merge.py",
        "            argmax = tl.minimum(argmax, tl.where(m_part == m, column, NO_COLUMN))\n",
        "            argmax = tl.where(m_part == m, column, argmax)\n",
        f"{_UNIT}linear_combine.py",
    ),
    Fault(
        "the max is not subtracted between shards",
        f"{_KERNELS}merge.py",
        "        d += weight * d_part\n",
        "        d += d_part\n",
        _WHOLE,
    ),
    # The plain-torch twin.
    Fault(
        "the max is not subtracted",
        f"{_TWIN}statistics.py",
        "    from_max = u.sub_(_finite_or_zero(m)[:, None])\n",
        "    m.zero_()\n    from_max = u\n",
        _WHOLE,
    ),
    Fault(
        "-inf - -inf",
        f"{_TWIN}statistics.py",
        "    return torch.where(m == -torch.inf, 0.0, m)\n",
        "    return m\n",
        f"{_UNIT}special_values.py",
    ),
    Fault(
        "one rank's sum is dropped",
        f"{_TWIN}merge.py",
        "        d = d + weight[part] * gathered[part, 1]\n",
        "        d = d + weight[part] * gathered[part, 1] * (part != 1)\n",
        _WHOLE,
    ),
    Fault(
        "smoothing over the shard's vocabulary",
        f"{_TWIN}merge.py",
        "(log_d - s / problem.classes)",
        "(log_d - s / problem.real_columns)",
        _WHOLE,
    ),
    Fault(
        "the target's column goes by its global id",
        f"{_TWIN}gradient.py",
        "        grad[y == problem.ignore_index] = 0.0\n",
        "",
        _WHOLE,
    ),
    Fault(
        "padding is left as it was",
        f"{_TWIN}gradient.py",
        "        part[..., problem.real_columns :] = 0.0\n",
        "",
        _WHOLE,
    ),
    # Autograd, ownership, communication, reduction.
    Fault(
        "logits are overwritten while somebody sees them",
        "te_ce/ownership.py",
        "    return not graph_is_kept and counts.within(calibrated)\n",
        "    return not graph_is_kept\n",
        f"{_UNIT}inplace.py",
    ),
    Fault(
        "a retained graph counts for nothing",
        "te_ce/ownership.py",
        "    return not graph_is_kept and counts.within(calibrated)\n",
        "    return counts.within(calibrated)\n",
        f"{_UNIT}inplace.py",
    ),
    Fault(
        "a second backward finds its own gradient",
        "te_ce/autograd.py",
        "    if ctx.is_overwritten:\n",
        "    if False:\n",
        "tests/faults/test_logits_interrupted.py",
    ),
    Fault(
        "a second derivative is a wrong number",
        "te_ce/autograd.py",
        "    return forbid_second_derivative(grad_logits, logits, *(grad for grad in grads if grad is not None))\n",
        "    return grad_logits\n",
        f"{_UNIT}outputs_in_backward.py",
    ),
    Fault(
        "the mean counts ignored rows",
        "te_ce/reduction.py",
        "(target.long() != ignore_index).sum().clamp(min=1)",
        "max(1, target.numel())",
        f"{_UNIT}fuzz.py::test_holds[torch-cpu-calls]",
    ),
    Fault(
        "the hidden states' gradient is not summed over the ranks",
        "te_ce/collectives.py",
        "        return PendingSum(partial, dist.all_reduce(partial, group=group, async_op=True), partial)\n",
        "        return PendingSum(partial, None, partial)\n",
        f"{_RANKS}linear.py",
        2,
    ),
    # The linear loss.
    Fault(
        "the weight's gradient is that of the last tokens",
        f"{_LINEAR}token_walk.py",
        "(add_product if number else set_product)(sums.weight[real], grad.t(), part.hidden)",
        "set_product(sums.weight[real], grad.t(), part.hidden)",
        f"{_UNIT}linear_weights.py",
    ),
    Fault(
        "the hidden states' gradient is that of the last chunk",
        f"{_LINEAR}vocabulary_walk.py",
        "(add_product if number else set_product)(of_hidden, grad, batch.weight[columns])",
        "set_product(of_hidden, grad, batch.weight[columns])",
        f"{_UNIT}linear_values.py",
    ),
    Fault(
        "kept logits are overwritten though another backward may come",
        f"{_LINEAR}nodes.py",
        "            overwrites_kept = not _graph_is_kept() and not _is_captured(saved)\n",
        "            overwrites_kept = True\n",
        f"{_UNIT}linear_keep.py",
    ),
    Fault(
        "the kept chunks are taken for others",
        f"{_LINEAR}vocabulary_walk.py",
        "logits = kept[number - len(chunks)] if is_kept else buffers.scratch(columns)\n        if not is_kept",
        "logits = kept[0] if is_kept else buffers.scratch(columns)\n        if not is_kept",
        f"{_UNIT}linear_keep.py",
    ),
    # Megatron.
    Fault(
        "negative labels are no class",
        "megatron_patch/model.py",
        "    return labels.masked_fill(labels < 0, options.ignore_index)\n",
        "    return labels\n",
        f"{_MEGATRON}flag.py",
    ),
    Fault(
        "options are not passed on",
        "megatron_patch/linear.py",
        "    options = times(application.options, origin.scale)\n",
        "    options = times(LossOptions(), origin.scale)\n",
        f"{_MEGATRON}linear.py",
    ),
    Fault(
        "the loss has Megatron's layout of logits",
        "megatron_patch/linear.py",
        "    return loss.transpose(0, 1).contiguous()\n",
        "    return loss.contiguous()\n",
        f"{_MEGATRON}linear.py",
    ),
    Fault(
        "the fused loss takes a group of one",
        "megatron_patch/linear.py",
        "        layer_group(layer), options,",
        "        None, options,",
        f"{_RANKS}megatron_linear_tp.py",
        2,
    ),
    Fault(
        "a factor of the logits is dropped",
        "megatron_patch/linear.py",
        "    if factor == 1.0:\n",
        "    if factor:\n",
        f"{_MEGATRON}linear.py",
    ),
)
