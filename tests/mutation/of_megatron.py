"""Faults of the plugin."""

from __future__ import annotations

from tests.mutation.fault import MEGATRON, RANKS, Fault

_FLAG, _LINEAR, _SCOPE = f"{MEGATRON}flag.py::test_", f"{MEGATRON}linear.py::test_", f"{MEGATRON}linear_scope.py::test_"
_BINDINGS, _MAIN_GRAD = f"{MEGATRON}bindings.py::test_", f"{MEGATRON}main_grad.py::test_"

_PUT_BACK = "        if binding.is_ours():\n            _put_back(binding)\n    #"


def _fault(name: str, file: str, old: str, new: str, *tests: str, ranks: int = 1) -> Fault:
    return Fault(f"Megatron: {name}", f"megatron_patch/{file}.py", old, new, tests, ranks=ranks)


LOSSES = (
    _fault(
        "negative labels are no ignored rows",
        "model",
        "    return labels.masked_fill(labels < 0, options.ignore_index)\n",
        "    return labels\n",
        f"{MEGATRON}native.py::test_negative_labels_are_ignored",
    ),
    _fault(
        "gathered logits are taken for a shard",
        "model",
        "    if width == full:\n        return True\n",
        "    if width == full:\n        return False\n",
        f"{RANKS}megatron_tp.py::test_gathered_logits",
        ranks=2,
    ),
    _fault(
        "the loss on logits is not transposed back",
        "wiring",
        "    return loss.transpose(0, 1).contiguous()\n",
        "    return loss.contiguous()\n",
        f"{_FLAG}flag",
    ),
    _fault(
        "the loss on logits gets no options",
        "wiring",
        "group=group, options=options, inplace",
        "group=group, options=LossOptions(), inplace",
        f"{_FLAG}options_reach_the_loss",
    ),
    _fault(
        "the loss on logits is of one rank",
        "wiring",
        "group=group, options=options, inplace",
        "group=None, options=options, inplace",
        f"{RANKS}megatron_tp.py::test_options_reach_every_rank",
        ranks=2,
    ),
    _fault(
        "Megatron's own losses get no options",
        "native",
        "group=group, options=options, inplace",
        "group=group, inplace",
        f"{MEGATRON}options.py::test_two_values_through_megatrons_functions",
    ),
    _fault(
        "smoothing of a call is not Megatron's formula",
        "native",
        ', smoothing="others"',
        "",
        f"{MEGATRON}native.py::test_smoothing_argument_overrides_the_options",
    ),
)

LINEAR = (
    _fault(
        "options are not passed on",
        "linear",
        "    options = times(application.options, origin.scale)\n",
        "    options = times(LossOptions(), origin.scale)\n",
        f"{_LINEAR}options_reach_the_loss",
    ),
    _fault(
        "keep is not passed on",
        "linear",
        ", keep=application.keep\n",
        "\n",
        f"{_LINEAR}keep_reaches_the_loss",
    ),
    _fault(
        "the fused loss has Megatron's layout of logits",
        "linear",
        "    return loss.transpose(0, 1).contiguous()\n",
        "    return loss.contiguous()\n",
        f"{_LINEAR}fused",
    ),
    _fault(
        "the fused loss takes a group of one",
        "linear",
        "        layer_group(layer), options,",
        "        None, options,",
        f"{RANKS}megatron_linear_tp.py::test_options_reach_every_rank",
        ranks=2,
    ),
    _fault(
        "a factor of the logits is dropped",
        "linear",
        "    if factor == 1.0:\n",
        "    if factor:\n",
        f"{_LINEAR}scaled_logits",
    ),
    _fault(
        "the weight is the layer's, whichever it was called with",
        "linear",
        "    weight, layer = origin.weight, origin.layer\n",
        "    weight, layer = origin.layer.weight, origin.layer\n",
        f"{_SCOPE}weight_that_is_passed_in",
    ),
    _fault(
        "the layer's input may change before the loss",
        "deferred",
        "        if self._read_versions() != self._versions:\n",
        "        if False:\n",
        f"{MEGATRON}deferred.py::test_a_layer_whose_input_changed_in_place_is_an_error",
    ),
    _fault(
        "logits that were changed count as untouched",
        "deferred",
        "        return not made.is_inference() and not is_watched and _state(made) == self._made_as\n",
        "        return not made.is_inference() and not is_watched\n",
        f"{MEGATRON}declined.py::test_logits_used_before_the_loss",
    ),
)

MAIN_GRAD = (
    _fault(
        "main_grad is not added to",
        "main_grad",
        "            add_product(place, left, hidden)\n",
        "            pass\n",
        f"{_MAIN_GRAD}rows_are_added",
    ),
    _fault(
        "main_grad is added to twice",
        "main_grad",
        "            add_product(place, left, hidden)\n",
        "            add_product(place, left, hidden)\n            add_product(place, left, hidden)\n",
        f"{_MAIN_GRAD}rows_are_added",
    ),
    _fault(
        "Megatron's hooks add the gradient again",
        "main_grad",
        "        weight.grad_added_to_main_grad = True\n",
        "",
        f"{_MAIN_GRAD}what_autograd_gets",
    ),
    _fault(
        "main_grad is that of the backward",
        "main_grad",
        '        main_grad = getattr(weight, "main_grad", None) if main_grad is None else main_grad\n',
        '        main_grad = getattr(weight, "main_grad", None)\n',
        f"{_MAIN_GRAD}main_grad_is_that_of_the_forward",
    ),
)

PATCH = (
    _fault(
        "revert leaves a binding",
        "bindings",
        f"    for binding in reversed(bindings):\n{_PUT_BACK}",
        f"    for binding in reversed(bindings[1:]):\n{_PUT_BACK}",
        f"{_FLAG}revert_restores_by_identity",
    ),
    _fault(
        "revert leaves modules imported meanwhile",
        "bindings",
        "            setattr(module, attribute, binding.original)\n",
        "            pass\n",
        f"{_BINDINGS}restore_reaches_modules_that_imported_ours_meanwhile",
    ),
    _fault(
        "what others still hold goes on after revert",
        "patch",
        "        application.active = False\n",
        "",
        f"{MEGATRON}apply.py::test_what_others_still_hold_of_ours_behaves_as_megatron",
    ),
    _fault(
        "options of the command line are lost",
        "arguments",
        "    return dataclasses.replace(options, **given)\n",
        "    return options\n",
        f"{MEGATRON}arguments.py::test_every_option_reaches_the_loss",
    ),
)

OF_MEGATRON = (*LOSSES, *LINEAR, *MAIN_GRAD, *PATCH)
