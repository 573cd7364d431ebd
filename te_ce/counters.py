"""How many losses each implementation has served in this process: the answer to "is it really on?"."""

from __future__ import annotations

from collections import Counter

_served: Counter[str] = Counter()


def count_loss(implementation: str) -> None:
    """Record one loss served by `implementation` ("triton" or "torch")."""
    _served[implementation] += 1


def served() -> dict[str, int]:
    """Losses served since the process started, or since `reset`, by implementation."""
    return {"triton": _served["triton"], "torch": _served["torch"]}


def reset() -> None:
    """Start counting from 0."""
    _served.clear()
