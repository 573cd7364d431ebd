"""The environment variables that te_ce reads, all of them, each read at the call.

TE_CE_CHECK_TARGETS   1: every call behaves as with check_targets=True (host synchronisation; for debugging). On every
                      rank or on none.
TE_CE_BACKEND         auto (default), torch (the plain-torch twin on any device) or triton (the kernels or an error).
                      On CUDA the twin's sums are torch's own: a row's last bits may depend on the batch there.
TE_CE_CHUNK_COLUMNS   columns of a chunk of the linear loss, instead of what its rule says; may differ by rank.
TE_CE_CHUNK_TOKENS    tokens of a chunk where token_weights are given, likewise; the same on every rank.
TRITON_INTERPRET      Triton's own: 1 runs the kernels on CPU tensors.
"""

from __future__ import annotations

import os

_NAMES = ("TE_CE_CHECK_TARGETS", "TE_CE_BACKEND", "TRITON_INTERPRET")
_BOOLEANS = {"": False, "0": False, "1": True}
_BACKENDS = ("auto", "torch", "triton")


def settings() -> tuple[str | None, ...]:
    """The variables as they are now, unread: equal as long as nothing below changes its answer."""
    # Not `get`, which finds out by an exception that a variable is not there.
    return tuple([os.environ[name] if name in os.environ else None for name in _NAMES])  # noqa: SIM401


def check_targets_requested() -> bool:
    """TE_CE_CHECK_TARGETS; ValueError when it is neither 0 nor 1."""
    value = os.environ.get("TE_CE_CHECK_TARGETS", "")
    if value not in _BOOLEANS:
        raise ValueError(f"TE_CE_CHECK_TARGETS: expected 0 or 1, got {value!r}")
    return _BOOLEANS[value]


def check_targets_may_be_requested() -> bool:
    """Whether TE_CE_CHECK_TARGETS is anything but off, a wrong value included; raises nothing."""
    return os.environ.get("TE_CE_CHECK_TARGETS", "") not in ("", "0")


def chunk_columns() -> int | None:
    """TE_CE_CHUNK_COLUMNS; None where it is not set, ValueError when it is no positive integer."""
    return _positive("TE_CE_CHUNK_COLUMNS")


def chunk_tokens() -> int | None:
    """TE_CE_CHUNK_TOKENS; None where it is not set, ValueError when it is no positive integer."""
    return _positive("TE_CE_CHUNK_TOKENS")


def _positive(name: str) -> int | None:
    value = os.environ.get(name, "")
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise ValueError(f"{name}: expected a positive integer, got {value!r}")
    return int(value)


def requested_backend() -> str:
    """TE_CE_BACKEND; ValueError when it names no backend."""
    value = os.environ.get("TE_CE_BACKEND", "") or "auto"
    if value not in _BACKENDS:
        raise ValueError(f"TE_CE_BACKEND: expected one of {', '.join(_BACKENDS)}, got {value!r}")
    return value


def interpreter_requested() -> bool:
    """TRITON_INTERPRET, as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
