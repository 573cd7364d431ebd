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
@pytest.mark.parametrize("features", [1, 256, 4096, 16384])
def test_chunks_of_the_vocabulary(features: int, itemsize: int) -> None:
    for tokens, columns in itertools.product(_TOKENS, _SIZES):
        cut = vocabulary_chunks(tokens, features, columns, itemsize)
        _check(cut, columns, chunks._COLUMNS_STEP)
        least = chunks._LEAST_COLUMNS * tokens
        if cut:
            widest = (cut[0].stop - chunks._COLUMNS_STEP) * tokens
            assert widest * itemsize < max(chunks._VOCABULARY_CHUNK_BYTES, least * itemsize)
            assert widest * features < max(chunks._MULTIPLICATIONS, least * features)
        # No more chunks than these ask for.
        worth = min(
            chunks._VOCABULARY_CHUNK_BYTES // max(1, tokens * itemsize),
            chunks._MULTIPLICATIONS // max(1, tokens * features),
        )
        assert len(cut) <= -(-columns // max(chunks._LEAST_COLUMNS, worth))


def test_chunks_are_narrower_where_some_are_kept() -> None:
    shape = 8192, 4096, 128256, 2
    for whole in ("recompute", 0.0, 1.0):
        assert len(vocabulary_chunks(*shape, whole)) == 4
    for part in (0.1, 0.99, 1 << 20, 10**12):
        assert len(vocabulary_chunks(*shape, part)) == 8
    assert len(vocabulary_chunks(8192, 4096, 32000, 2, 0.5)) == 4, "not below the least number of columns"


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
    for cut in (vocabulary_chunks(6, 8, 37, 4), token_chunks(37, 6, 4)):
        _check(cut, 37, width)
        assert len(cut) == -(-37 // width)
    assert vocabulary_chunks(6, 8, 0, 4) == token_chunks(0, 6, 4) == ()


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
