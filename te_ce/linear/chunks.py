"""How the logits are cut into chunks, and how many chunks of the vocabulary are kept from forward to backward.

A chunk must be wide: each one reads and writes the float32 gradient of all hidden states once. And it must be small:
while it is worked on, it is the one part of the logits that exists.
"""

from __future__ import annotations

import math
from typing import Literal

from te_ce import environment

Keep = Literal["recompute"] | float | int

# A chunk of the vocabulary has so many multiplications in each of its GEMMs, which pay for what every GEMM loses at its
# end: 32768 columns of 8192 tokens with 4096 features. At the most so many bytes, at the least so many columns.
_MULTIPLICATIONS = 1 << 40
_VOCABULARY_CHUNK_BYTES = 1 << 30
_LEAST_COLUMNS = 8192

# Chunks of which some are kept.
_KEPT_IN_PARTS = 8

# A chunk of tokens: every further one adds to the gradient of the whole weight.
_TOKEN_CHUNK_BYTES = 5 << 29
_LEAST_TOKENS = 512

# Chunks are multiples of a GEMM's tile, and every row of a chunk begins at a multiple of so many elements.
_COLUMNS_STEP = 256
_TOKENS_STEP = 128

SMALLEST_BUDGET = 1 << 20


def vocabulary_chunks(
    tokens: int, features: int, columns: int, itemsize: int, keep: Keep = "recompute"
) -> tuple[slice, ...]:
    """Columns of every chunk of the vocabulary: all but the last one equally wide; none where there are no columns.

    Args:
        tokens: N.
        features: H.
        columns: of this rank.
        itemsize: bytes of a logit.
        keep: where it asks for a part of the logits, chunks are narrower, so that many sizes of a part exist.
    """
    width = environment.chunk_columns()
    if width is None:
        worth = _MULTIPLICATIONS // max(1, tokens * features)
        fitting = min(worth, _VOCABULARY_CHUNK_BYTES // max(1, tokens * itemsize))
        if keep not in ("recompute", 0.0, 1.0):
            fitting = min(fitting, columns // _KEPT_IN_PARTS)
        width = _balanced(columns, max(_LEAST_COLUMNS, fitting), _COLUMNS_STEP)
    return _cut(columns, width)


def token_chunks(tokens: int, columns: int, itemsize: int) -> tuple[slice, ...]:
    """Rows of every chunk of the tokens: the same on every rank, as each chunk is a collective; none for no tokens.

    Args:
        tokens: N.
        columns: of a rank, the same on every rank.
        itemsize: bytes of a logit.
    """
    rows = environment.chunk_tokens()
    if rows is None:
        fitting = max(_LEAST_TOKENS, _TOKEN_CHUNK_BYTES // max(1, columns * itemsize))
        rows = _balanced(tokens, fitting, _TOKENS_STEP)
    return _cut(tokens, rows)


def padded_width(columns: int) -> int:
    """Elements from row to row of a chunk of so many columns."""
    return -(-columns // _COLUMNS_STEP) * _COLUMNS_STEP


def kept_chunks(keep: Keep, chunks: tuple[slice, ...], tokens: int, itemsize: int) -> int:
    """How many chunks of the vocabulary, the last ones, `keep` has room for."""
    if keep == "recompute":
        return 0
    if isinstance(keep, float):
        # 0.3 of 10 chunks are 3, though 0.3 * 10 is a little less.
        return math.floor(keep * len(chunks) + 1e-9)
    count, left = 0, keep
    for chunk in reversed(chunks):
        left -= tokens * padded_width(chunk.stop - chunk.start) * itemsize
        if left < 0:
            break
        count += 1
    return count


def check_keep(keep: object) -> None:
    """Refuse a memory option that is none.

    Raises:
        TypeError, ValueError: not "recompute", a share from 0.0 to 1.0, or an int of at least SMALLEST_BUDGET bytes.
    """
    expected = f'keep: expected "recompute", a float from 0.0 to 1.0, or an int of at least {SMALLEST_BUDGET} bytes'
    if isinstance(keep, bool) or not isinstance(keep, (str, float, int)):
        raise TypeError(f"{expected}, got {type(keep).__name__}")
    if isinstance(keep, str):
        is_valid = keep == "recompute"
    elif isinstance(keep, float):
        is_valid = 0.0 <= keep <= 1.0
    else:
        is_valid = keep >= SMALLEST_BUDGET
    if not is_valid:
        hint = f"; for a share write {float(keep)}" if keep in (0, 1) else ""
        raise ValueError(f"{expected}, got {keep!r}{hint}")


def _balanced(size: int, fitting: int, step: int) -> int:
    """The size of the fewest equal chunks of at most about `fitting`, a multiple of `step`."""
    count = max(1, -(-size // fitting))
    equal = -(-size // count)
    return max(1, -(-equal // step)) * step


def _cut(size: int, step: int) -> tuple[slice, ...]:
    return tuple(slice(start, min(start + step, size)) for start in range(0, size, step))
