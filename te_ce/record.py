"""What a rank tells the others before a checked call, in a record of one size whatever there is to tell.

A fixed size is what lets ranks that disagree on everything else still read each other.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Mapping

from torch import Tensor

from te_ce.options import LossOptions
from te_ce.shard import VocabShard

RECORD_BYTES = 1024

# Of a record, in this order; after them the length of the text, and the text.
_NUMBERS = (
    "failed",
    "declared",
    "start",
    "stop",
    "size",
    "bad_rows",
    "row",
    "value",
    "bad_scales",
    "scale_row",
    "target_checksum",
    "scale_checksum",
    "checksum",
)
_HEADER = struct.Struct(f"<{len(_NUMBERS) + 1}q")
TEXT_BYTES = RECORD_BYTES - _HEADER.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One rank's side of a call.

    Attributes:
        failed: the rank could not make the call; `text` is its error and nothing else here means anything.
        declared: its caller passed the shard.
        start, stop, size: its shard.
        bad_rows: how many targets are neither a class nor ignored.
        row, value: the first of them, counted over all leading dimensions, and its target.
        bad_scales: how many rows have a scale of their own that is no finite number other than 0.
        scale_row: the first of them.
        target_checksum, scale_checksum: of the values, which are the same on every rank; 0 where there are none.
        text: what must be the same on every rank, one `name=value` a line; as read, the first TEXT_BYTES of it.
        checksum: of the whole text.
    """

    failed: bool = False
    declared: bool = False
    start: int = 0
    stop: int = 0
    size: int = 0
    bad_rows: int = 0
    row: int = 0
    value: int = 0
    bad_scales: int = 0
    scale_row: int = 0
    target_checksum: int = 0
    scale_checksum: int = 0
    text: str = ""
    checksum: int = 0

    @property
    def facts(self) -> dict[str, str]:
        """The text by name."""
        return dict(line.split("=", 1) for line in self.text.split("\n") if "=" in line)


def describe_call(
    logits: Tensor,
    target: Tensor,
    row_scale: Tensor | None,
    options: LossOptions,
    shard: VocabShard,
    declared: bool,
    outputs: tuple[str, ...] = (),
    more: Mapping[str, object] | None = None,
) -> Record:
    """The record of a call, but for the values of its targets and scales, which are still to be looked at.

    Args:
        logits: of their dtype.
        more: what else must be the same on every rank, by name.
    """
    facts: dict[str, object] = {
        "target.shape": tuple(target.shape),
        "target.dtype": target.dtype,
        "logits.dtype": logits.dtype,
        "outputs": outputs,
        **(more or {}),
    }
    for field in dataclasses.fields(options):
        # By an option on one rank and by the environment on another is no disagreement.
        if field.name != "check_targets":
            facts[field.name] = getattr(options, field.name)
    if row_scale is not None:
        facts["scale"] = row_scale
    text = "\n".join(f"{name}={_text(value)}" for name, value in facts.items())
    return Record(
        declared=declared,
        start=shard.start,
        stop=shard.stop,
        size=shard.size,
        text=text,
        checksum=zlib.crc32(text.encode()),
    )


def describe_error(error: Exception) -> Record:
    """The record of a rank that can't make the call."""
    return Record(failed=True, text=f"{type(error).__name__}: {error}")


def encode(record: Record) -> bytes:
    """RECORD_BYTES bytes; a text that is too long is cut."""
    text = record.text.encode(errors="replace")[:TEXT_BYTES]
    numbers = (getattr(record, name) for name in _NUMBERS)
    return (_HEADER.pack(*numbers, len(text)) + text).ljust(RECORD_BYTES, b"\0")


def decode(data: bytes) -> Record:
    """The record that `encode` wrote."""
    *numbers, length = _HEADER.unpack_from(data)
    # The cut may have gone through a character.
    text = data[_HEADER.size : _HEADER.size + length].decode(errors="ignore")
    failed, declared, *others = numbers
    return Record(
        failed=bool(failed), declared=bool(declared), text=text, **dict(zip(_NUMBERS[2:], others, strict=True))
    )


def _text(value: object) -> str:
    """Equal for values that are equal: 1, 1.0 and an enumeration's 1 are one number, 0.0 and -0.0 another."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, float):
        is_exact_int = value.is_integer() and abs(value) < 2**53
        return repr(int(value)) if is_exact_int else float.__repr__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    if isinstance(value, str):
        return str.__repr__(value)
    return repr(value)
