"""Megatron's command line: the values "te_ce" and "te_ce_linear", and te_ce's options as --te-ce-*.

    add_megatron_arguments   from 0.12 on; gives the parser Megatron's arguments, and with the patch these too
    validate_args            after which the options that were given are those of every loss
    validate_yaml            the same for --yaml-cfg, whose file takes the place of the command line: te_ce_* at its top

A training script is not changed for it. Where `megatron.training` is not there, nor is a command line of Megatron's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

from megatron_patch.application import Application
from megatron_patch.config import IMPLEMENTATION, LINEAR, asks_for_linear, asks_for_te_ce, asks_for_transformer_engine
from megatron_patch.errors import PatchError
from megatron_patch.releases import unsupported
from te_ce import LossOptions
from te_ce.linear.chunks import Keep, check_keep

FLAG = "--cross-entropy-fusion-impl"
KEEP = "keep"
STRICT = "strict"
_SECTIONS = ("model_parallel", "language_model")  # of a YAML file


def parse_keep(text: str) -> Keep:
    """`recompute`, a share such as 0.25, or bytes such as 2GiB, 512MiB, 1073741824.

    Raises:
        ValueError: anything else.
    """
    keep: Any = text
    for unit, size in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if text.endswith(unit):
            keep = int(float(text.removesuffix(unit)) * size)
            break
    else:
        if text != "recompute":
            keep = int(text) if text.isdecimal() else float(text)
    check_keep(keep)
    return cast(Keep, keep)


# Name (of the option, of the field of LossOptions), how it is parsed, what --help says.
_OPTIONS: dict[str, dict[str, Any]] = {
    "label_smoothing": {"type": float, "help": "share of the target's mass that is spread over the vocabulary"},
    "smoothing": {"choices": ["uniform", "others"], "help": "over which classes; others is Megatron's formula"},
    "z_loss_weight": {"type": float, "help": "weight of the squared log of the softmax's normaliser"},
    "softcap": {"type": float, "help": "cap of the logits: cap tanh(x / cap)"},
    "scale": {"type": float, "help": "factor of the logits after the cap, 1 / temperature"},
    "vocab_size": {"type": int, "help": "true size of the vocabulary; the columns past it are left out"},
    "ignore_index": {"type": int, "help": "label of rows that do not count; all negative labels are such"},
    "check_targets": {"action": "store_true", "help": "compare ranks and labels first, at the cost of waiting"},
    "reproducible_tp": {"action": "store_true", "help": "the same bits at every tensor-parallel size"},
    KEEP: {"type": parse_keep, "help": "logits that te_ce_linear keeps: recompute, a share, or bytes such as 2GiB"},
    STRICT: {"action": "store_true", "help": "an error where te_ce_linear would be served on logits"},
}


def adding(original: Callable[..., Any], application: Application) -> Callable[..., Any]:
    """`add_megatron_arguments`, with te_ce's values and options while the patch is applied."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        parser = original(parser, *args, **kwargs)
        if application.active:
            _extend_choices(parser)
            _add_options(parser)
        return parser

    return add_megatron_arguments


def _extend_choices(parser: argparse.ArgumentParser) -> None:
    actions = [action for action in parser._actions if FLAG in action.option_strings]
    if not actions:
        raise PatchError(f"{FLAG}: expected among Megatron's arguments, not found; {unsupported()}")
    (action,) = actions
    if action.choices is not None:
        action.choices = [*action.choices, *(each for each in (IMPLEMENTATION, LINEAR) if each not in action.choices)]


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(title="te_ce")
    for name, how in _OPTIONS.items():
        # Absent, not off: what is given twice is compared, and what is given in vain refused.
        group.add_argument(_flag(name), default=None, **how)


def _flag(name: str) -> str:
    return f"--te-ce-{name.replace('_', '-')}"


def taking(original: Callable[..., Any], application: Application) -> Callable[..., Any]:
    """`validate_args` or `validate_yaml`, after which the options in its arguments are the application's."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if application.active:
            take(result if result is not None else args[0], application)
        return result

    return function


def take(arguments: Any, application: Application) -> None:
    """Make the te_ce_* values in Megatron's validated `arguments` the options of every loss.

    Raises:
        ValueError: an option is outside its range, differs from what `apply()` was given, or would have no effect.
    """
    settings = Settings(arguments)
    is_ours = asks_for_te_ce(settings)
    given = {name: getattr(arguments, f"te_ce_{name}", None) for name in _OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    serves = is_ours or application.replace_native or (asks_for_transformer_engine(settings) and application.replace_te)
    for name in given:
        if not serves or (name in (KEEP, STRICT) and not asks_for_linear(settings)):
            wanted = LINEAR if name in (KEEP, STRICT) else f"{IMPLEMENTATION} or {LINEAR}"
            raise ValueError(f"{_flag(name)}: has no effect without --cross-entropy-loss-fusion {FLAG} {wanted}")
    if given.pop(STRICT, False):
        application.strict = True
    keep = given.pop(KEEP, None)
    if isinstance(keep, str):  # from a YAML file
        keep = parse_keep(keep)
    if keep is not None:
        _refuse_another(KEEP, keep, application.keep, "recompute")
        application.keep = keep
    application.options = _merged(application.options, given)
    _check_vocabulary(arguments, application.options)


def _merged(options: LossOptions, given: dict[str, Any]) -> LossOptions:
    usual = LossOptions()
    for name, value in given.items():
        _refuse_another(name, value, getattr(options, name), getattr(usual, name))
    return dataclasses.replace(options, **given)


def _refuse_another(name: str, given: object, applied: object, usual: object) -> None:
    if applied not in (given, usual):
        raise ValueError(f"{_flag(name)}: {given!r} is given, but apply() was given {applied!r}; give it in one place")


def _check_vocabulary(arguments: Any, options: LossOptions) -> None:
    padded = getattr(arguments, "padded_vocab_size", None)
    if options.vocab_size is not None and isinstance(padded, int) and options.vocab_size > padded:
        raise ValueError(
            f"{_flag('vocab_size')}: expected at most the padded vocabulary of {padded}, got {options.vocab_size}"
        )


class Settings:
    """Megatron's arguments, read as a configuration: of a YAML file, its sections too."""

    def __init__(self, arguments: Any) -> None:
        self._places = [arguments, *(getattr(arguments, name, None) for name in _SECTIONS)]

    def __getattr__(self, name: str) -> Any:
        for place in self._places:
            if hasattr(place, name):
                return getattr(place, name)
        raise AttributeError(name)
