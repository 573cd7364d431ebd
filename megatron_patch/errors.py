"""The one exception of this package, apart so that every file can raise it without importing the others."""

from __future__ import annotations


class PatchError(RuntimeError):
    """The patch cannot be applied, or is not what was asked for; the message names the symbol and the remedy."""
