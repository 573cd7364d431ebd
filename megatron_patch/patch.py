"""apply, revert, patched, status: the life of one application of the patch in this process.

There is at most one at a time. Everything is found and judged first (`seams.plan`), then replaced all or none
(`bindings.install`), then written to the log. After `revert()` Megatron holds its own objects again, by identity.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from torch import Tensor

from megatron_patch import bindings, log, releases, seams
from megatron_patch.application import Application
from megatron_patch.errors import PatchError
from megatron_patch.log import logger, say
from megatron_patch.status import BindingStatus, Status
from te_ce import LossOptions
from te_ce.counters import served
from te_ce.linear.chunks import Keep, check_keep

_lock = threading.RLock()
_current: tuple[Application, list[bindings.Binding]] | None = None


def apply(
    replace_native: bool = False,
    replace_te: bool = False,
    options: LossOptions | None = None,
    strict: bool = False,
    keep: Keep = "recompute",
) -> None:
    """Make Megatron know te_ce's loss. Inert until a TransformerConfig asks for it with
    `cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te_ce"`, or "te_ce_linear" for the loss fused with the
    output layer (megatron-core 0.10 has no second field: assign it to the configuration).

    Works before and after Megatron's models are imported or built. Applying again with the same arguments changes
    nothing; with others it is an error, because two parties of one process would then want different losses.

    Args:
        replace_native: also serve callers of Megatron's own fused and unfused losses, whatever the configuration.
            Their `label_smoothing` argument, if not 0, overrides the options' and follows Megatron's formula.
        replace_te: also serve configurations that ask for Transformer Engine's loss, `cross_entropy_fusion_impl="te"`,
            whether that is installed or not. The checks of Megatron that refuse it, or warn of it, for faults that
            te_ce's loss does not have, are lifted, which is then written to the log.
        options: of te_ce, for every loss that it serves; `reduction` must be "none". None: `LossOptions()`.
        strict: raise where there would be a warning: a release of Megatron that is not known, a binding that
            another party has changed before, a model class that overrides the loss; and later, in training, a
            "te_ce_linear" that cannot be had and would be served on logits.
        keep: logits that "te_ce_linear" keeps from forward to backward, as `te_ce.linear_cross_entropy` takes it. Only
            that loss can honour it: with "te_ce", or where "te_ce_linear" would be served on logits, it is an error.

    Raises:
        PatchError: Megatron is missing or too old, a symbol to replace is missing, the patch is applied with other
            arguments, or, with `strict`, anything doubtful. Nothing is then replaced.
        TypeError, ValueError: `options` do not fit Megatron, or `keep` is none.
    """
    global _current
    options = _check_options(options)
    check_keep(keep)
    with _lock:
        wanted = Application(options, bool(replace_native), bool(replace_te), bool(strict), keep)
        if _current is not None:
            _check_same(*_current, wanted, strict)
            return
        application = wanted
        version = releases.megatron_version()
        planned, doubts = seams.plan(application)
        _raise_or_warn(releases.version_doubts(version) + doubts, strict)
        bindings.install(planned)
        _current = (application, planned)
    say("megatron_patch: megatron-core %s, replaced %s", version, ", ".join(binding.name for binding in planned))


def revert(strict: bool = False) -> None:
    """Put Megatron's own objects back, by identity; nothing to do if the patch is not applied.

    A binding that another party has changed since is left as it is, with a warning. What that party may still hold of
    ours behaves as Megatron's original from now on.

    Raises:
        PatchError: with `strict`, after everything else was restored, if such a binding was found.
    """
    global _current
    with _lock:
        if _current is None:
            return
        application, planned = _current
        foreign = bindings.restore(planned)
        application.active = False
        _current = None
    _raise_or_warn([f"{_taken_over(binding)}; left as it is" for binding in foreign], strict)


@contextlib.contextmanager
def patched(
    replace_native: bool = False,
    replace_te: bool = False,
    options: LossOptions | None = None,
    strict: bool = False,
    keep: Keep = "recompute",
) -> Iterator[None]:
    """Context manager: `apply` with these arguments, and `revert` unless it was applied before."""
    before = _current
    apply(replace_native, replace_te, options, strict, keep)
    try:
        yield
    finally:
        if before is None:
            revert()


def status() -> Status:
    """What is replaced in this process now, and how many losses te_ce has served in it. Imports nothing."""
    with _lock:
        application, planned = _current if _current is not None else (None, [])
        core = sys.modules.get("megatron.core")
        return Status(
            applied=application is not None,
            replace_native=application is not None and application.replace_native,
            replace_te=application is not None and application.replace_te,
            options=None if application is None else application.options,
            keep=None if application is None else application.keep,
            megatron=None if core is None else str(getattr(core, "__version__", "unknown")),
            bindings=tuple(
                BindingStatus(b.owner, b.attribute, b.role, b.is_ours(), bindings.describe(b.found())) for b in planned
            ),
            served=served(),
            heads={} if application is None else dict(application.heads),
            reasons=() if application is None else tuple(application.reasons),
        )


def sum_up() -> None:
    """Write to the log what was served; for the end of a run."""
    with _lock:
        if _current is not None:
            log.sum_up(_current[0], served())


def _check_options(options: LossOptions | None) -> LossOptions:
    if options is None:
        return LossOptions()
    if not isinstance(options, LossOptions):
        raise TypeError(f"options: expected a te_ce.LossOptions or None, got {type(options).__name__}")
    if options.reduction != "none":
        raise ValueError(
            'options.reduction: expected "none", as Megatron masks and averages the loss itself, '
            f"got {options.reduction!r}"
        )
    if isinstance(options.scale, Tensor):
        raise ValueError("options.scale: expected a number, got a tensor: it is as long as one batch")
    return options


def _check_same(application: Application, planned: list[bindings.Binding], wanted: Application, strict: bool) -> None:
    (now, are), (asked, would_be) = _arguments(application), _arguments(wanted)
    if now != asked:
        raise PatchError(f"already applied with {are}, now asked for {would_be}; call revert() first")
    _raise_or_warn([_taken_over(binding) for binding in planned if not binding.is_ours()], strict)


def _arguments(application: Application) -> tuple[object, str]:
    """What `apply` was given, to compare and to print."""
    native, te = application.replace_native, application.replace_te
    options, keep = application.options, application.keep
    return (native, te, options, keep), f"replace_native={native}, replace_te={te}, keep={keep!r}, {options}"


def _taken_over(binding: bindings.Binding) -> str:
    return f"{binding.name}: expected our replacement, found {bindings.describe(binding.found())}, set by another party"


def _raise_or_warn(doubts: list[str], strict: bool) -> None:
    if doubts and strict:
        raise PatchError("; ".join(doubts))
    for doubt in doubts:
        logger.warning("megatron_patch: %s", doubt)
