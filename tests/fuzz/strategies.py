"""What hypothesis draws. Every choice begins with the simplest, to which a failing example is shrunk."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from te_ce import LossOptions
from te_ce.outputs import OUTPUTS
from tests.fuzz import values as kinds
from tests.fuzz.values import Values

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_ROUND_NUMBERS = (16, 64, 96, 127, 128, 129, 255, 257, 512, 1000, 1024, 1025)
LONGEST = 8193
_LONG = (2047, 2048, 2049, 4095, 4096, 4097, 5000, 8193)


def rows(longest: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Leading dimensions, none and of size 0 included; few where rows cannot be long either."""
    if longest < _LONG[0]:
        return st.lists(st.integers(0, 2), max_size=2).map(tuple) | st.tuples(st.integers(1, 5))
    return st.lists(st.integers(0, 4), max_size=3).map(tuple) | st.tuples(st.integers(1, 40))


def widths(most_ranks: int, longest: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Columns of each rank, any of them 0 but not all, up to `longest`."""
    few = st.integers(0, 40) | st.sampled_from(tuple(size for size in _ROUND_NUMBERS if size <= longest))
    many = [st.sampled_from(tuple(size for size in _LONG if size <= longest))] if longest >= _LONG[0] else [few]
    if longest > 10_000:
        many.append(st.integers(10_000, longest))
    any_width = st.one_of(few, few, few, *many)
    drawn: st.SearchStrategy[tuple[int, ...]] = st.lists(any_width, min_size=1, max_size=most_ranks).map(tuple)
    return drawn.filter(any)


def dtypes(float64: bool) -> st.SearchStrategy[torch.dtype]:
    """Of logits."""
    return st.sampled_from((*FLOATS, torch.float64) if float64 else FLOATS)


def values() -> st.SearchStrategy[Values]:
    """Kinds of values, and a seed."""
    return st.builds(
        Values,
        seed=st.integers(0, 2**31),
        logits=st.sampled_from(kinds.KINDS),
        target=st.sampled_from(kinds.TARGETS),
        upstream=st.sampled_from(kinds.UPSTREAMS),
        has_row_scale=st.sampled_from((False, False, False, True)),
    )


@st.composite
def options(draw: Any, columns: int, of: Values, reductions: tuple[str, ...] = ("none",)) -> LossOptions:
    """Options for a vocabulary of `columns`, under which no value that is asked for is beyond float32."""
    vocab_size = draw(st.none() | st.integers(1, columns))
    classes = columns if vocab_size is None else vocab_size
    alpha = draw(st.sampled_from((0.0, 0.0, 0.1, 0.5, 0.9, 0.999, 1e-6)))
    fields = {
        "vocab_size": vocab_size,
        "label_smoothing": alpha,
        "smoothing": draw(st.sampled_from(("uniform", "others"))) if classes > 1 else "uniform",
        "softcap": draw(st.sampled_from((None, None, 0.5, 2.0, 30.0, 1e4))),
        "scale": 1.0 if of.has_row_scale else draw(st.sampled_from((1.0, 1.0, 0.7, -1.5, 0.5, 50.0, 1e-3))),
        "ignore_index": draw(st.sampled_from((-100, -1, 0, classes - 1, classes + 5, 2**31 - 1))),
        "reduction": draw(st.sampled_from(reductions)),
    }
    # The square of an lse of 1e30 is not a float32.
    weights = (0.0,) if of.logits == "extreme" else (0.0, 0.0, 1e-4, 0.05, 2.0)
    return LossOptions(z_loss_weight=draw(st.sampled_from(weights)), **fields)


def outputs() -> st.SearchStrategy[tuple[str, ...]]:
    """Any of them, in the order that they have."""
    return st.sets(st.sampled_from(OUTPUTS)).map(lambda names: tuple(each for each in OUTPUTS if each in names))
