"""`cross_entropy_fusion_impl="te"`, served by te_ce instead of Transformer Engine (replace_te); installed or not.

A model whose configuration asks for "te" is served by the loss method (wiring.py). Here is what is left:

    te_parallel_cross_entropy   Megatron's wrapper around Transformer Engine's loss, for whoever calls it directly;
                                None where Transformer Engine is missing
    validate_args               refuses "te" from 0.18.1 on, and every fused loss, te_ce's too, in deterministic mode
    __post_init__               of the configuration: warns of "te" in 0.19

Megatron objects to faults of Transformer Engine's kernel, which te_ce's loss does not have. While such a function
runs, it gets to see a setting that it has no objection to.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_patch.application import Application
from megatron_patch.config import asks_for_te_ce, asks_for_transformer_engine
from megatron_patch.deferred import plain
from megatron_patch.log import say
from megatron_patch.model import ignore_negative
from te_ce import vocab_parallel_cross_entropy


def stand_in(original: Callable[..., Tensor] | None, application: Application) -> Callable[..., Tensor]:
    """A function with the arguments of `te_parallel_cross_entropy`, served by te_ce; the original once reverted.

    logits [s, b, V / TP], labels [s, b] -> float32 loss [s, b]. Negative labels are ignored rows. Every loss of te_ce
    can be captured in a CUDA graph, so that `is_cg_capturable` has no effect.
    """

    def te_parallel_cross_entropy(
        logits: Tensor, labels: Tensor, tp_group: ProcessGroup | None, is_cg_capturable: bool = False
    ) -> Tensor:
        if application.active:
            target = ignore_negative(labels, application.options)
            return vocab_parallel_cross_entropy(
                plain(logits), target, group=tp_group, options=application.options, inplace="auto"
            )
        if original is None:
            raise RuntimeError(
                "te_parallel_cross_entropy: te_ce was reverted, and Transformer Engine is not installed; "
                "look the function up again, or apply megatron_patch"
            )
        # Some releases have no fourth argument.
        return original(logits, labels, tp_group, *((is_cg_capturable,) if is_cg_capturable else ()))

    return te_parallel_cross_entropy if original is None else functools.wraps(original)(te_parallel_cross_entropy)


def without_refusal(original: Callable[..., Any], application: Application) -> Callable[..., Any]:
    """`original`, which checks the settings in its first argument, without its objections to what te_ce serves.

    Those are to "te", and in deterministic mode to every fused loss: te_ce's has the same bits in every run.
    """
    first = next(iter(inspect.signature(original).parameters))

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        settings = args[0] if args else kwargs.get(first)
        shown = _unobjectionable(settings, application) if application.active else {}
        if not shown:
            return original(*args, **kwargs)
        with _shown(settings, shown):
            result = original(*args, **kwargs)
        _say_once(original, shown, settings, application)
        return result

    return function


def _unobjectionable(settings: Any, application: Application) -> dict[str, object]:
    """Settings that Megatron has no objection to, in the place of those that te_ce serves all the same."""
    is_te = application.replace_te and asks_for_transformer_engine(settings)
    shown: dict[str, object] = {"cross_entropy_fusion_impl": "native"} if is_te else {}
    if getattr(settings, "deterministic_mode", False) and (is_te or asks_for_te_ce(settings)):
        shown["cross_entropy_loss_fusion"] = False
    return shown


@contextlib.contextmanager
def _shown(settings: Any, shown: dict[str, object]) -> Iterator[None]:
    """Within: the settings have these values."""
    kept = {name: getattr(settings, name) for name in shown}
    for name, value in shown.items():
        setattr(settings, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(settings, name, value)


def _say_once(original: Callable[..., Any], shown: dict[str, object], settings: Any, application: Application) -> None:
    name = original.__qualname__
    if name not in application.said:
        application.said.add(name)
        say(
            'megatron_patch: cross_entropy_fusion_impl="%s" is served by te_ce; %s is shown %s in its place, so that '
            "its check does not refuse it",
            settings.cross_entropy_fusion_impl,
            name,
            ", ".join(f"{setting}={value!r}" for setting, value in shown.items()),
        )
