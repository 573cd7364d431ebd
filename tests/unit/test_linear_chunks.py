"""How the logits are cut: every one in exactly one chunk, of about the budget, in steps; and how many are kept."""

from __future__ import annotations

import itertools

import pytest

from te_ce.linear import chunks
from te_ce.linear.chunks import kept_chunks, padded_width, token_chunks, vocabulary_chunks

_SIZES = [0, 1, 2, 255, 256, 257, 8191, 8192, 8193, 16384, 50257, 64128, 128256, 151936, 10**6]
_TOKENS = [0, 1, 7, 512, 8192, 65536, 10**6]


def _check(cut: tuple[slice, ...], size: int, step: int) -> None:
    """They cover the size in their order, all but the last one equally wide, in multiples of the step."""
    ends = [0, *(each.stop for each in cut)]
    assert [each.start for each in cut] == ends[:-1]
    assert ends[-1] == size
    widths = [each.stop - each.start for each in cut]
    assert all(widths)
    assert len(set(widths[:-1])) <= 1
    if len(widths) > 1:
        assert widths[0] % step == 0
        assert widths[-1] <= widths[0]


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_chunks_of_the_vocabulary(itemsize: int) -> None:
    for tokens, columns in itertools.product(_TOKENS, _SIZES):
        cut = vocabulary_chunks(tokens, columns, itemsize)
        _check(cut, columns, chunks._COLUMNS_STEP)
        budget = max(chunks._VOCABULARY_CHUNK_BYTES, chunks._LEAST_COLUMNS * tokens * itemsize)
        if cut:
            assert (cut[0].stop - chunks._COLUMNS_STEP) * tokens * itemsize < budget
        # No more chunks than the budget asks for.
        fitting = max(chunks._LEAST_COLUMNS, chunks._VOCABULARY_CHUNK_BYTES // max(1, tokens * itemsize))
        assert len(cut) <= -(-columns // fitting)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_chunks_of_the_tokens(itemsize: int) -> None:
    for tokens, columns in itertools.product([*_TOKENS, 513, 4097], _SIZES):
        cut = token_chunks(tokens, columns, itemsize)
        _check(cut, tokens, chunks._TOKENS_STEP)
        budget = max(chunks._TOKEN_CHUNK_BYTES, chunks._LEAST_TOKENS * columns * itemsize)
        if cut:
            assert (cut[0].stop - chunks._TOKENS_STEP) * columns * itemsize < budget


@pytest.mark.parametrize("width", [1, 10, 37, 50])
def test_chunks_of_the_environment(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", str(width))
    monkeypatch.setenv("TE_CE_CHUNK_TOKENS", str(width))
    for cut in (vocabulary_chunks(6, 37, 4), token_chunks(37, 6, 4)):
        _check(cut, 37, width)
        assert len(cut) == -(-37 // width)
    assert vocabulary_chunks(6, 0, 4) == token_chunks(0, 6, 4) == ()


def test_rows_of_a_chunk_begin_at_whole_vectors() -> None:
    for columns in _SIZES:
        assert padded_width(columns) % 256 == 0
        assert columns <= padded_width(columns) < columns + 256


@pytest.mark.parametrize("count", [1, 3, 7, 10, 29])
def test_a_share_is_of_the_chunks(count: int) -> None:
    cut = tuple(slice(256 * n, 256 * (n + 1)) for n in range(count))
    for kept in range(count + 1):
        assert kept_chunks(kept / count, cut, 8, 2) == kept
        if kept < count:
            assert kept_chunks((kept + 0.9) / count, cut, 8, 2) == kept
    assert kept_chunks("recompute", cut, 8, 2) == 0
    assert kept_chunks(1.0, (), 8, 2) == 0


def test_a_budget_holds_the_last_chunks() -> None:
    cut = (slice(0, 512), slice(512, 1024), slice(1024, 1030))
    last, others = 8 * 256 * 2, 8 * 512 * 2
    fits = {last - 1: 0, last: 1, last + others - 1: 1, last + others: 2, last + 2 * others: 3, 10**12: 3}
    for budget, kept in fits.items():
        assert kept_chunks(budget, cut, 8, 2) == kept
    assert kept_chunks(1 << 20, cut, 0, 2) == 3
    assert kept_chunks(1 << 20, (), 8, 2) == 0
