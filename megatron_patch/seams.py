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
    parser   megatron.training.arguments.add_megatron_arguments and      where megatron.training imports
    check    validate_args, yaml_arguments.validate_yaml, likewise

The function names are the obvious targets, and the wrong ones: every caller has its own alias of them, bound before
anybody can patch. A symbol that is missing, or has another signature than the releases known, is an error; what is
merely unusual (an unknown release, somebody else's earlier patch) is a doubt, which `strict=True` turns into one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from megatron_patch import arguments, config, native, output_layer, scope, transformer_engine, wiring
from megatron_patch.application import Application
from megatron_patch.bindings import ABSENT, Binding, aliases, describe
from megatron_patch.errors import PatchError
from megatron_patch.releases import LAST, imported_version, parsed, unsupported

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
PARSER = Seam("megatron.training.arguments", "add_megatron_arguments", (("parser",),))
ARGUMENT_CHECK = Seam("megatron.training.arguments", "validate_args", (("args", "defaults"),))
YAML_CHECK = Seam("megatron.training.yaml_arguments", "validate_yaml", (("args", "defaults"),))


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
    hook = config.check_after(check, application)
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
        bindings += _te_bindings(application, doubts)
    return bindings + _training_bindings(application, doubts), doubts


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


def _training_bindings(application: Application, doubts: list[str]) -> list[Binding]:
    """Megatron's command line and its checks. A script that cannot import them does not go through them either."""
    try:
        training = importlib.import_module(PARSER.module)
    except Exception:  # whatever a package that was made for another Python or other packages raises
        return []
    bindings = []
    # Up to 0.11 there is no such function, and no choice of the implementation on the command line.
    if hasattr(training, PARSER.name) or (parsed(imported_version()) or LAST) >= (0, 12):
        bindings += _aliased(PARSER, "parser", lambda original: arguments.adding(original, application), doubts)
    checks = [ARGUMENT_CHECK]
    with contextlib.suppress(ImportError):
        importlib.import_module(YAML_CHECK.module)
        checks.append(YAML_CHECK)
    for seam in checks:
        bindings += _aliased(seam, "check", lambda original: _check(original, application), doubts)
    return bindings


def _check(original: Any, application: Application) -> Any:
    return arguments.taking(transformer_engine.without_refusal(original, application), application)


def _aliased(seam: Seam, role: str, make: Callable[[Any], Any], doubts: list[str]) -> list[Binding]:
    """Every module attribute that holds the seam's function."""
    _, _, original = _find(seam, doubts)
    replacement = make(original)
    return [Binding(module, name, original, replacement, role) for module, name in aliases(original)]


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
        raise PatchError(f"{seam.module}.{seam.name}: expected in megatron-core, not found; {unsupported()}")
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
            f"{seam.module}.{seam.name}: expected parameters {expected}, found ({', '.join(found)}); {unsupported()}"
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
