"""Which releases of megatron-core are known, and which one is here."""

from __future__ import annotations

import importlib
import re
import sys

from megatron_patch.errors import PatchError

FIRST, LAST = (0, 10), (0, 19)
"""Releases whose wiring is known, as (major, minor)."""

KNOWN = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"


def megatron_version() -> str:
    """Version of the installed megatron-core, which is imported.

    Raises:
        PatchError: megatron-core is missing, does not import, or is older than the oldest release supported.
    """
    wanted = f"megatron-core >= {FIRST[0]}.{FIRST[1]}"
    try:
        importlib.import_module("megatron.core")
    except ImportError as error:
        raise PatchError(f"megatron_patch needs {wanted}: import megatron.core failed ({error}); install it") from error
    version = imported_version()
    release = parsed(version)
    if release is not None and release < FIRST:
        raise PatchError(f"megatron_patch needs {wanted}, found {version}; install a newer release")
    return version


def imported_version() -> str:
    """Version of the megatron-core that is imported, "unknown" where it does not say."""
    return str(getattr(sys.modules.get("megatron.core"), "__version__", "unknown"))


def version_doubts(version: str) -> list[str]:
    """One line if nothing is known about this release."""
    release = parsed(version)
    if release is not None and FIRST <= release <= LAST:
        return []
    return [f"megatron-core {version}: expected {KNOWN}, the releases whose wiring is known; check status()"]


def parsed(version: str) -> tuple[int, int] | None:
    """(major, minor), or None for something else."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def unsupported() -> str:
    """What to say of a release in which something has moved."""
    return f"this is megatron-core {imported_version()}; supported is {KNOWN}, as released"
