"""How many examples there were, and of what."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any


class Tally:
    """Counts examples, and every choice of theirs that has a name."""

    def __init__(self) -> None:
        self.examples = 0
        self.choices: Counter[str] = Counter()

    def note(self, example: Any) -> None:
        """One more."""
        self.examples += 1
        self._note(type(example).__name__, example)

    def _note(self, name: str, value: Any) -> None:
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                self._note(field.name, getattr(value, field.name))
        elif isinstance(value, (str, bool)) or name in ("dtype", "target_dtype"):
            self.choices[f"{name} {value}"] += 1

    def add(self, other: Tally) -> None:
        """All of another one's."""
        self.examples += other.examples
        self.choices.update(other.choices)

    def text(self, name: str) -> str:
        """A line, and one for the rarest choice: nothing may be left out unseen."""
        rarest = min(self.choices.items(), key=lambda item: item[1], default=("none", 0))
        return f"{name}: {self.examples} examples; the rarest choice ({rarest[0]}): {rarest[1]}"
