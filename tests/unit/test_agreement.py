"""Checked calls in one process: what a rank tells the others, and what is made of the records of all."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
import torch

from te_ce import LossOptions, VocabShard, agreement, vocab_parallel_cross_entropy
from te_ce.agreement import judge
from te_ce.problem import ShardProblem
from te_ce.record import RECORD_BYTES, TEXT_BYTES, Record, decode, describe_call, describe_error, encode

_PROBLEM = ShardProblem.resolve(LossOptions(), VocabShard(0, 4, 12), 3)


def _records(ranks: int = 3, **options: Any) -> list[Record]:
    """What ranks that agree tell each other: 4 columns each, 5 rows."""
    logits, target = torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)
    shards = [VocabShard(4 * rank, 4 * rank + 4, 4 * ranks) for rank in range(ranks)]
    return [describe_call(logits, target, None, LossOptions(**options), shard, False) for shard in shards]


def _verdict(records: list[Record]) -> str:
    """The error that the records make, or "agreed"."""
    try:
        judge(records, _PROBLEM)
    except (ValueError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


def _refused(records: list[Record]) -> str:
    verdict = _verdict(records)
    assert verdict != "agreed"
    # As the ranks read it.
    assert _verdict([decode(encode(record)) for record in records]) == verdict
    return verdict


def _with_fact(record: Record, logits: Any = None, target: Any = None, **others: Any) -> Record:
    """As if the call had been made with these."""
    options = others.pop("options", LossOptions())
    logits = torch.zeros(5, 4) if logits is None else logits
    target = torch.zeros(5, dtype=torch.int64) if target is None else target
    shard = VocabShard(record.start, record.stop, record.size)
    return describe_call(logits, target, others.pop("scale", None), options, shard, record.declared, **others)


@pytest.mark.parametrize(
    "record",
    [
        Record(),
        _records()[2],
        Record(bad_rows=2**31 + 5, row=2**40, value=-(2**63)),
        Record(declared=True, start=2**63 - 2, stop=2**63 - 1, size=2**63 - 1, value=2**63 - 1, checksum=2**32 - 1),
        describe_error(ValueError("target: \N{GREEK SMALL LETTER ALPHA}\nanother line\0")),
        describe_error(ValueError()),
    ],
)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    data = encode(record)
    assert len(data) == RECORD_BYTES
    assert decode(data) == record


@pytest.mark.parametrize("character", ["a", "\N{GREEK SMALL LETTER ALPHA}", "\N{PILE OF POO}"])
def test_a_long_text_is_cut_between_characters(character: str) -> None:
    data = encode(describe_error(ValueError("x" * 3 + character * RECORD_BYTES)))
    assert len(data) == RECORD_BYTES
    read = decode(data)
    assert read.failed
    assert read.text.startswith(f"ValueError: xxx{character}")
    assert read.text.rstrip(character) == "ValueError: xxx"
    assert TEXT_BYTES - 3 <= len(read.text.encode()) <= TEXT_BYTES


def test_a_text_that_is_no_unicode() -> None:
    assert decode(encode(describe_error(ValueError("\udc80")))).text == "ValueError: ?"


def test_ranks_that_agree() -> None:
    assert _verdict(_records()) == "agreed"
    assert _verdict(_records(label_smoothing=0.1, check_targets=True)) == "agreed"
    # One rank asks by the option, the others by the environment.
    assert _verdict([*_records()[:2], _records(check_targets=True)[2]]) == "agreed"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LossOptions)])
def test_every_option_is_compared(name: str) -> None:
    options = LossOptions()
    object.__setattr__(options, name, "another")
    records = _records()
    records[1] = _with_fact(records[1], options=options)
    if name == "check_targets":
        judge(records, _PROBLEM)
        return
    refused = _refused(records)
    assert refused.startswith(f"ValueError: {name}: expected the same on every rank of the group, got ")
    assert "'another' on rank 1" in refused


def test_options_of_later_are_compared() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class More(LossOptions):
        temperature: float | torch.Tensor = 1.0

    records = [_with_fact(record, options=More()) for record in _records()]
    judge(records, _PROBLEM)
    records[2] = _with_fact(records[2], options=More(temperature=torch.ones(5)))
    assert _refused(records) == (
        "ValueError: temperature: expected the same on every rank of the group, "
        "got 1 on rank 0, 1 on rank 1, tensor on rank 2"
    )


class _Number(enum.IntEnum):
    ONE = 1


class _Word(enum.StrEnum):
    MEAN = "mean"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("label_smoothing", [0, 0.0, -0.0]),
        ("ignore_index", [1, _Number.ONE]),
        ("label_smoothing", [0.1, torch.tensor(0.1, dtype=torch.float64).item()]),
        ("reduction", ["mean", _Word.MEAN]),
    ],
)
def test_values_that_are_equal_agree(field: str, values: list[Any]) -> None:
    records = []
    for rank, value in enumerate(values):
        options = LossOptions()
        object.__setattr__(options, field, value)
        shard = VocabShard(rank, rank + 1, len(values))
        records.append(describe_call(torch.zeros(2, 1), torch.zeros(2), None, options, shard, False))
    assert _verdict(records) == "agreed"


@pytest.mark.parametrize("values", [(0.1, 0.1 + 2**-56), (1, True), ("None", None), (1e300, 2e300)], ids=str)
def test_values_that_differ_disagree(values: tuple[Any, Any]) -> None:
    records = _records(2)
    for rank, value in enumerate(values):
        options = LossOptions()
        object.__setattr__(options, "label_smoothing", value)
        records[rank] = _with_fact(records[rank], options=options)
    assert "label_smoothing: expected the same" in _refused(records)


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"target": torch.zeros(1, 5).long()}, "target.shape: .* (5,) on rank 0, (5,) on rank 1, (1, 5) on rank 2"),
        ({"target": torch.zeros(5).int()}, "target.dtype: .* torch.int64 on rank 1, torch.int32 on rank 2"),
        ({"logits": torch.zeros(5, 4).half()}, "logits.dtype: .* torch.float32 on rank 1, torch.float16 on rank 2"),
        ({"scale": torch.ones(5)}, "scale: .* 1 on rank 0, 1 on rank 1, tensor on rank 2"),
        ({"outputs": ("entropy", "lse")}, "outputs: .* () on rank 0, () on rank 1, ('entropy', 'lse') on rank 2"),
    ],
)
def test_what_must_be_alike(arguments: dict[str, Any], refused: str) -> None:
    records = _records()
    records[2] = _with_fact(records[2], **arguments)
    name, values = refused.split(" .* ")
    message = _refused(records)
    assert message.startswith(f"ValueError: {name} expected the same on every rank of the group, got ")
    assert message.endswith(values)


def test_a_difference_past_what_a_record_holds() -> None:
    shapes = [(1,) * 500 + (5,), (1,) * 500 + (5, 1)]
    records = _records(2)
    records = [
        _with_fact(record, target=torch.zeros(5).as_strided(shape, (1,) * len(shape)))
        for record, shape in zip(records, shapes, strict=True)
    ]
    with pytest.raises(ValueError, match=r"options: expected the same .* differ past the first 9.. bytes"):
        judge([decode(encode(record)) for record in records], _PROBLEM)


def _with_shards(*shards: tuple[int, int, int], declared: bool = True) -> list[Record]:
    return [
        dataclasses.replace(record, start=start, stop=stop, size=size, declared=declared)
        for record, (start, stop, size) in zip(_records(len(shards)), shards, strict=True)
    ]


def test_shards_that_are_a_vocabulary() -> None:
    assert _verdict(_with_shards((0, 7, 7), (7, 7, 7))) == "agreed"
    assert _verdict(_with_shards((0, 0, 7), (0, 0, 7), (0, 6, 7), (6, 7, 7))) == "agreed"
    # Declared on one rank, equal by default on another.
    mixed = _with_shards((0, 4, 8), (4, 8, 8))
    assert _verdict([mixed[0], dataclasses.replace(mixed[1], declared=False)]) == "agreed"


def test_shards_that_are_none() -> None:
    assert _refused(_with_shards((0, 4, 8), (4, 9, 9))) == (
        "ValueError: shard: expected the same size on every rank of the group (without a shard: columns x ranks), "
        "got 8 on rank 0, 9 on rank 1"
    )
    order = "ValueError: shard: expected shards that follow each other in the order of the ranks of the group, got "
    assert _refused(_with_shards((0, 4, 9), (5, 9, 9))) == f"{order}[0, 4) on rank 0, [5, 9) on rank 1"
    assert _refused(_with_shards((0, 4, 9), (2, 5, 9), (5, 9, 9))).endswith(
        "[0, 4) on rank 0, [2, 5) on rank 1, [5, 9) on rank 2"
    )
    assert _refused(_with_shards((0, 4, 8), (5, 10, 10), declared=False)) == (
        "ValueError: logits: expected as many columns on every rank of the group, as no shard is declared, "
        "got 4 on rank 0, 5 on rank 1; declare uneven shards with shard=VocabShard(...)"
    )


def test_the_graver_fault_is_named_and_of_those_the_first_ranks() -> None:
    records = _records()
    records[1] = dataclasses.replace(records[1], bad_rows=2, row=7, value=-3)
    records[2] = dataclasses.replace(records[2], bad_rows=1, row=0, value=12)
    assert _refused(records) == (
        "IndexError: target: rank 1 has 2 bad row(s), the first is row 7 with target -3: "
        "expected 0 <= target < 12 or ignore_index=-100"
    )
    records[2] = dataclasses.replace(records[2], start=9)
    assert "shard: expected shards that follow" in _refused(records)
    records[2] = _with_fact(records[2], options=LossOptions(reduction="sum"))
    assert "reduction: expected the same" in _refused(records)
    records[1:] = [describe_error(TypeError("logits: wrong")), describe_error(ValueError("target: wrong"))]
    assert _refused(records) == (
        "RuntimeError: group: expected every rank to compute the loss, but rank 1 raised TypeError: logits: wrong"
    )


def test_one_rank_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def collective(*args: object) -> None:
        raise AssertionError("a collective was issued")

    monkeypatch.setattr("te_ce.agreement.gather_records", collective)
    logits, target = torch.zeros(3, 4), torch.tensor([0, 3, 4])
    with pytest.raises(IndexError, match=r"rank 0 has 1 bad row.*row 2 with target 4"):
        vocab_parallel_cross_entropy(logits, target, check_targets=True)
    with pytest.raises(TypeError, match="unexpected keyword 'alpha'"):
        vocab_parallel_cross_entropy(logits, target, check_targets=True, alpha=1)


def test_an_unchecked_call_describes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(*args: object, **keywords: object) -> None:
        raise AssertionError("described")

    monkeypatch.setattr("te_ce.call.describe_call", describe)
    monkeypatch.delenv("TE_CE_CHECK_TARGETS", raising=False)
    logits, target = torch.zeros(3, 11), torch.tensor([0, 3, 10])
    assert vocab_parallel_cross_entropy(logits, target).isfinite().all()
    with pytest.raises(AssertionError, match="described"):
        vocab_parallel_cross_entropy(logits, target, check_targets=True)


def _judged(targets: list[list[int]], scales: list[list[float]] | None = None, ignore_index: int = -100) -> None:
    """As ranks with these targets and scales would judge each other."""
    options = LossOptions(ignore_index=ignore_index)
    shards = [VocabShard(8 * rank, 8 * rank + 8, 8 * len(targets)) for rank in range(len(targets))]
    records = []
    for rank, (values, shard) in enumerate(zip(targets, shards, strict=True)):
        target = torch.tensor(values)
        scale = None if scales is None else torch.tensor(scales[rank])
        problem = ShardProblem.resolve(options, shard, len(targets))
        record = describe_call(torch.zeros(len(values), 8), target, scale, options, shard, True)
        records.append(decode(encode(agreement._with_values(record, target, scale, problem))))
    judge(records, problem)


def test_ranks_with_equal_values_agree() -> None:
    assert _judged([[1, 2, -100, 15]] * 2, [[1.0, -2.0, 0.5, 3.0]] * 2) is None
    # Nobody looks at the scale of an ignored row.
    assert _judged([[1, -100]] * 2, [[1.0, 0.0]] * 2) is None


@pytest.mark.parametrize(
    "other", [[1, 2, 4, 3], [2, 1, 3, 4], [4, 3, 2, 1], [1, 2, 3, -100], [0, 2, 3, 4], [3, 1, 3, 4], [2, 2, 2, 4]]
)
def test_other_valid_targets_are_a_disagreement(other: list[int]) -> None:
    with pytest.raises(ValueError, match=r"target: expected the same values on every rank .* with checksums"):
        _judged([[1, 2, 3, 4], other])


@pytest.mark.parametrize("other", [[2.0, 1.0], [1.0, 3.0], [-1.0, 2.0]])
def test_other_scales_are_a_disagreement(other: list[float]) -> None:
    with pytest.raises(ValueError, match=r"scale: expected the same values on every rank .* with checksums"):
        _judged([[1, 2]] * 2, [[1.0, 2.0], other])


@pytest.mark.parametrize("wrong", [0.0, float("inf"), float("nan")])
def test_scales_that_are_none(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"scale: rank 0 has 1 row\(s\) whose scale is 0, infinite or NaN, .* row 1"):
        _judged([[1, 2]] * 2, [[1.0, wrong]] * 2)
    with pytest.raises(ValueError, match=r"scale: rank 0 has 1 row\(s\)"):
        vocab_parallel_cross_entropy(
            torch.zeros(2, 8), torch.tensor([1, 2]), scale=torch.tensor([1.0, wrong]), check_targets=True
        )
