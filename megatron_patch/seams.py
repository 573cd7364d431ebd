"""What is replaced in Megatron, and how each symbol is found and judged before anything is touched.

    role     binding                                                     releases
    loss     LanguageModule.compute_language_model_loss (class level)    0.10 - 0.19
    config   ModelParallelConfig.__post_init__          (class level)    0.10 - 0.19
    call     LanguageModule.__call__, which it inherits (class level)    0.10 - 0.19
    layer    ColumnParallelLinear.forward               (class level)    0.10 - 0.19
    native   the two _VocabParallelCrossEntropy classes by name, and     0.10 - 0.19, with replace_native only
             every module attribute that holds one of them or one of
             the two functions around them
    te       te_parallel_cross_entropy, every module attribute that      0.12 - 0.19, with replace_te only
             holds it
    check    megatron.training.arguments.validate_args, likewise         where megatron.training imports, replace_te

The function names are the obvious targets, and the wrong ones: every caller has its own alias of them, bound before
anybody can patch. A symbol that is missing, or has another signature than the releases known, is an error; what is
merely unusual (an unknown release, somebody else's earlier patch) is a doubt, which `strict=True` turns into one.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

from megatron_patch import config, native, output_layer, scope, transformer_engine, wiring
from megatron_patch.application import Application
from megatron_patch.bindings import ABSENT, Binding, aliases, describe
from megatron_patch.errors import PatchError

FIRST, LAST = (0, 10), (0, 19)
"""Releases of megatron-core whose wiring is known, as (major, minor)."""

_LOGITS = ("vocab_parallel_logits", "target")
_UNFUSED = ((*_LOGITS, "label_smoothing"), (*_LOGITS, "label_smoothing", "tp_group"))
_FUSED = (_LOGITS, (*_LOGITS, "tp_group"))


@dataclasses.dataclass(frozen=True)
class Seam:
    """One symbol of Megatron: its module, its dotted name in there, and the parameters that it may have."""

    module: str
    name: str
    parameters: tuple[tuple[str, ...], ...]


LOSS_METHOD = Seam(
    "megatron.core.models.common.language_module.language_module",
    "LanguageModule.compute_language_model_loss",
    (("self", "labels", "logits"),),
)
CONFIG_HOOK = Seam("megatron.core.model_parallel_config", "ModelParallelConfig.__post_init__", (("self",),))
LINEAR_LAYER = Seam(
    "megatron.core.tensor_parallel.layers",
    "ColumnParallelLinear.forward",
    (("self", "input_", "weight", "runtime_gather_output"),),
)
UNFUSED_CLASS = Seam("megatron.core.tensor_parallel.cross_entropy", "_VocabParallelCrossEntropy", _UNFUSED)
UNFUSED_FUNCTION = Seam("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy", _UNFUSED)
FUSED_CLASS = Seam("megatron.core.fusions.fused_cross_entropy", "_VocabParallelCrossEntropy", _FUSED)
FUSED_FUNCTION = Seam("megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy", _FUSED)
TE_FUNCTION = Seam(
    "megatron.core.extensions.transformer_engine",
    "te_parallel_cross_entropy",
    (("logits", "labels", "tp_group"), ("logits", "labels", "tp_group", "is_cg_capturable")),
)
ARGUMENT_CHECK = Seam("megatron.training.arguments", "validate_args", (("args", "defaults"),))


def megatron_version() -> str:
    """Version of the installed megatron-core, which is imported.

    Raises:
        PatchError: megatron-core is missing, does not import, or is older than the oldest release supported.
    """
    wanted = f"megatron-core >= {FIRST[0]}.{FIRST[1]}"
    try:
        core = importlib.import_module("megatron.core")
    except ImportError as error:
        raise PatchError(f"megatron_patch needs {wanted}: import megatron.core failed ({error}); install it") from error
    version = str(getattr(core, "__version__", "unknown"))
    release = _release(version)
    if release is not None and release < FIRST:
        raise PatchError(f"megatron_patch needs {wanted}, found {version}; install a newer release")
    return version


def version_doubts(version: str) -> list[str]:
    """One line if nothing is known about this release."""
    release = _release(version)
    if release is not None and FIRST <= release <= LAST:
        return []
    known = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
    return [f"megatron-core {version}: expected {known}, the releases whose wiring is known; check status()"]


def plan(application: Application) -> tuple[list[Binding], list[str]]:
    """Every binding to replace, and what is doubtful about them. Imports Megatron's modules, changes nothing.

    Raises:
        PatchError: a symbol is missing or is not what the known releases have.
    """
    doubts: list[str] = []
    holder, attribute, original = _find(LOSS_METHOD, doubts)
    doubts += _overriding_subclasses(holder, attribute)
    bindings = [Binding(holder, attribute, original, wiring.make_method(original, application), "loss")]
    bindings += _linear_bindings(holder, application, doubts)
    holder, attribute, original = _find(CONFIG_HOOK, doubts)
    check = transformer_engine.without_refusal(original, application) if application.replace_te else original
    hook = config.check_after(check, lambda: application.active)
    bindings.append(Binding(holder, attribute, original, hook, "config"))
    if application.replace_native:
        unfused, fused = native.make_unfused(application), native.make_fused(application)
        for seam, make, loss in (
            (UNFUSED_CLASS, native.stand_in_class, unfused),
            (UNFUSED_FUNCTION, native.stand_in_function, unfused),
            (FUSED_CLASS, native.stand_in_class, fused),
            (FUSED_FUNCTION, native.stand_in_function, fused),
        ):
            _, _, original = _find(seam, doubts)
            replacement = make(original, loss, application)
            bindings += [Binding(module, name, original, replacement, "native") for module, name in aliases(original)]
    if application.replace_te:
        bindings += _te_bindings(application, doubts) + _check_bindings(application, doubts)
    return bindings, doubts


def _linear_bindings(models: Any, application: Application, doubts: list[str]) -> list[Binding]:
    """What defers the logits: calls of a model, of `models` or derived, and its output layer."""
    call = vars(models).get("__call__", ABSENT)
    if call is not ABSENT:
        doubts.append(f"{models.__qualname__}.__call__: expected none, found {describe(call)}")
    holder, attribute, original = _find(LINEAR_LAYER, doubts)
    return [
        Binding(models, "__call__", call, scope.make_call(models, call, application), "call"),
        Binding(holder, attribute, original, output_layer.make_forward(original, holder, application), "layer"),
    ]


def _te_bindings(application: Application, doubts: list[str]) -> list[Binding]:
    """Megatron's wrapper around Transformer Engine's loss; none in 0.10, and None where that is not installed."""
    language_module = importlib.import_module(LOSS_METHOD.module)
    missing = object()
    original = getattr(language_module, TE_FUNCTION.name, missing)
    if original is missing:
        return []
    if original is None:
        holders = [(language_module, TE_FUNCTION.name)]  # not every module that holds a None
    else:
        _, _, original = _find(TE_FUNCTION, doubts)
        holders = list(aliases(original))
    replacement = transformer_engine.stand_in(original, application)
    return [Binding(module, name, original, replacement, "te") for module, name in holders]


def _check_bindings(application: Application, doubts: list[str]) -> list[Binding]:
    """The check of the command line's arguments. A script that cannot import it is not stopped by it either."""
    try:
        importlib.import_module(ARGUMENT_CHECK.module)
    except Exception:  # whatever a package that was made for another Python or other packages raises
        return []
    _, _, original = _find(ARGUMENT_CHECK, doubts)
    replacement = transformer_engine.without_refusal(original, application)
    return [Binding(module, name, original, replacement, "check") for module, name in aliases(original)]


def _find(seam: Seam, doubts: list[str]) -> tuple[Any, str, Any]:
    try:
        holder: Any = importlib.import_module(seam.module)
    except ImportError as error:
        raise PatchError(f"{seam.module}: expected in megatron-core, import failed ({error})") from error
    *path, attribute = seam.name.split(".")
    for step in path:
        holder = getattr(holder, step, None)
    original = getattr(holder, "__dict__", {}).get(attribute)
    if original is None:
        raise PatchError(
            f"{seam.module}.{seam.name}: expected in megatron-core, not found; this release is not supported"
        )
    if getattr(original, "__module__", None) != seam.module:
        doubts.append(f"{seam.module}.{seam.name}: expected Megatron's own, found {describe(original)}")
    else:
        _check_parameters(seam, original)
    return holder, attribute, original


def _check_parameters(seam: Seam, original: Any) -> None:
    if inspect.isclass(original):
        forward = getattr(original, "forward", None)
        found = tuple(inspect.signature(forward).parameters)[1:] if callable(forward) else ("no forward",)
    else:
        found = tuple(inspect.signature(original).parameters)
    if found not in seam.parameters:
        expected = " or ".join(f"({', '.join(names)})" for names in seam.parameters)
        raise PatchError(
            f"{seam.module}.{seam.name}: expected parameters {expected}, found ({', '.join(found)}); "
            "this release is not supported"
        )


def _overriding_subclasses(holder: Any, attribute: str) -> list[str]:
    doubts, waiting, seen = [], list(holder.__subclasses__()), set()
    while waiting:
        subclass = waiting.pop()
        if subclass in seen:
            continue
        seen.add(subclass)
        waiting += subclass.__subclasses__()
        if attribute in subclass.__dict__:
            name = f"{subclass.__module__}.{subclass.__qualname__}"
            doubts.append(f"{name} overrides {attribute}: te_ce serves it only where it calls super()")
    return doubts


def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
