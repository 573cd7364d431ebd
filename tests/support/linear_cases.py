"""Inputs of the tests of the linear loss: every option alone, then all pairs, each cut and kept in another way."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from te_ce import LossOptions
from tests.support.linear import LinearCase

# Fields of `LossOptions`, or of the case; the scale is held by float32.
_FEATURES: dict[str, dict[str, Any]] = {
    "uniform": {"label_smoothing": 0.1},
    "others": {"label_smoothing": 0.2, "smoothing": "others"},
    "z_loss": {"z_loss_weight": 0.05},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.75},
    "scale_negative": {"scale": -1.5},
    "row_scale": {"has_row_scale": True},
    "padded": {"vocab_size": 33},
    "ignored_class_id": {"ignore_index": 3},
    "no_bias": {"has_bias": False},
}
_OF_THE_CASE = ("has_row_scale", "has_bias")

# One after the other, so that each meets each of the others somewhere: no product of all.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEEPS = ({"keep": "recompute"}, {"keep": 0.5}, {"keep": 1.0}, {"budget_chunks": 2})
# Ragged; tokens one by one; all in one; two chunks, of which the second is of one column.
_CUTS = ({"chunk_columns": 10}, {"chunk_columns": 16, "chunk_tokens": 1}, {"chunk_columns": 40, "chunk_tokens": 9})
_CUTS += ({"chunk_columns": 32, "chunk_tokens": 5},)


def _case(names: tuple[str, ...], number: int) -> LinearCase:
    fields = {key: value for name in names for key, value in _FEATURES[name].items()}
    of_case = {key: fields.pop(key) for key in _OF_THE_CASE if key in fields}
    more = {**_KEEPS[number % 4], **_CUTS[number // 4 % 4]}
    return LinearCase("+".join(names), LossOptions(**fields), _DTYPES[number % 3], **of_case, **more)


def _agree(names: tuple[str, ...]) -> bool:
    """Whether no field is given twice."""
    fields = [key for name in names for key in (("scale",) if name == "row_scale" else _FEATURES[name])]
    return len(set(fields)) == len(fields)


_PAIRS = [pair for pair in itertools.combinations(_FEATURES, 2) if _agree(pair)]

_ALL = LossOptions(
    label_smoothing=0.1, smoothing="others", z_loss_weight=0.05, softcap=2.0, scale=-0.75, vocab_size=33, ignore_index=3
)

LINEAR_CASES = [
    # Each way of keeping, each dtype, without options.
    LinearCase("plain"),
    LinearCase("plain_bf16", dtype=torch.bfloat16, keep=0.5),
    LinearCase("plain_fp16", dtype=torch.float16, keep=1.0),
    LinearCase("plain_budget", budget_chunks=1),
    # Odd sizes, leading dimensions of any number, one column a chunk.
    LinearCase("one_row", rows=(2,), hidden_size=13, columns=5, chunk_columns=1, keep=0.4),
    LinearCase("three_dims", rows=(2, 1, 3), hidden_size=1, columns=5, chunk_columns=2),
    *(_case((name,), number) for number, name in enumerate(_FEATURES)),
    LinearCase("all", _ALL, keep=0.5),
    LinearCase("all_bf16_row_scale", _ALL, torch.bfloat16, has_row_scale=True, budget_chunks=1),
]
LINEAR_PAIRS = [_case(pair, number) for number, pair in enumerate(_PAIRS)]


def linear_case(name: str) -> LinearCase:
    """One of them."""
    return next(case for case in [*LINEAR_CASES, *LINEAR_PAIRS] if case.name == name)
