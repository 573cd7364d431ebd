"""Every mistake of a caller: an error that names the argument, what was expected and what it was."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import te_ce
from te_ce import (
    LossOptions,
    VocabShard,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
    vocab_parallel_log_probs,
)
from te_ce.collectives import gather_statistics
from te_ce.problem import ShardProblem, resolve_problem

_LOGITS = torch.zeros(3, 8)
_TARGET = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "target", "error", "message"),
    [
        ([[1.0]], _TARGET, TypeError, "logits: expected a torch.Tensor, got list"),
        (_LOGITS, [0], TypeError, "target: expected a torch.Tensor, got list"),
        (_LOGITS.long(), _TARGET, TypeError, "logits: expected float32, bfloat16, float16 or float64, got int64"),
        (_LOGITS.to(torch.float8_e4m3fn), _TARGET, TypeError, "logits: .* got float8_e4m3fn"),
        (_LOGITS, _TARGET.short(), TypeError, "target: expected int64 or int32 class ids, got int16"),
        (_LOGITS, _TARGET.float(), TypeError, "target: expected int64 or int32 class ids, got float32"),
        (_LOGITS, _TARGET[:2], ValueError, r"target: expected shape \(3,\), .* got \(2,\)"),
        (_LOGITS, _TARGET[:, None], ValueError, r"target: expected shape \(3,\), .* got \(3, 1\)"),
        (torch.tensor(1.0), torch.tensor(0), ValueError, "logits: expected at least one dimension"),
        (_LOGITS, _TARGET.to("meta"), ValueError, "target: expected a dense tensor with storage"),
        (_LOGITS.to("meta"), _TARGET, ValueError, "logits: expected a dense tensor with storage"),
        (_LOGITS.to_sparse(), _TARGET, ValueError, "logits: expected a dense tensor"),
        (TwoTensor(_LOGITS, _LOGITS), _TARGET, TypeError, "logits: expected a plain tensor, got TwoTensor; pass"),
    ],
)
def test_wrong_tensors(logits: Any, target: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vocab_parallel_cross_entropy(logits, target)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"label_smoothing": 1.0}, ValueError, r"label_smoothing: expected a number in \[0, 1\), got 1.0"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing: .* got -0.1"),
        ({"label_smoothing": float("nan")}, ValueError, "label_smoothing: expected a number, got nan"),
        ({"label_smoothing": "0.1"}, TypeError, "label_smoothing: expected a number, got str"),
        ({"label_smoothing": True}, TypeError, "label_smoothing: expected a number, got bool"),
        ({"smoothing": "megatron"}, ValueError, "smoothing: expected one of uniform, others, got 'megatron'"),
        ({"smoothing": None}, TypeError, "smoothing: expected one of uniform, others, got NoneType"),
        ({"reduction": "avg"}, ValueError, "reduction: expected one of none, sum, mean, got 'avg'"),
        ({"z_loss_weight": -1e-4}, ValueError, "z_loss_weight: expected a finite number >= 0, got -0.0001"),
        ({"z_loss_weight": float("inf")}, ValueError, "z_loss_weight: expected a finite number >= 0, got inf"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a finite number > 0 or None, got 0.0"),
        ({"softcap": -30.0}, ValueError, "softcap: .* got -30.0"),
        ({"softcap": "30"}, TypeError, "softcap: expected a number, got str"),
        ({"scale": 0.0}, ValueError, "scale: expected a finite number other than 0, got 0.0"),
        ({"scale": 1e39}, ValueError, "scale: .* got 1e"),
        ({"scale": float("nan")}, ValueError, "scale: expected a number, got nan"),
        ({"scale": "1"}, TypeError, "scale: expected a number, got str"),
        ({"scale": torch.ones(3, dtype=torch.float64)}, TypeError, "scale: .* float32 tensor, got a tensor of float64"),
        ({"scale": torch.ones(3, requires_grad=True)}, ValueError, "scale: expected a tensor without requires_grad"),
        ({"scale": torch.ones(2)}, ValueError, r"scale: expected shape \(3,\) on cpu, .* got \(2,\) on cpu"),
        ({"scale": torch.ones(())}, ValueError, r"scale: expected shape \(3,\) on cpu, .* got \(\) on cpu"),
        ({"scale": torch.ones(3, device="meta")}, ValueError, r"scale: .* got \(3,\) on meta"),
        ({"reproducible_tp": 1}, TypeError, "reproducible_tp: expected a bool, got int"),
        ({"outputs": "entropy"}, TypeError, r"outputs: .* got 'entropy'; write outputs=\(\"entropy\",\)"),
        ({"outputs": ("entropy", "logits")}, ValueError, "outputs: expected .* predictions, got 'logits' among them"),
        ({"outputs": (1,)}, TypeError, "outputs: .* got 1 among them"),
        ({"outputs": None}, TypeError, "outputs: .* got None"),
        ({"vocab_size": 0}, ValueError, "vocab_size: expected at least 1 class, got 0"),
        ({"vocab_size": 9}, ValueError, "vocab_size: expected at most the 8 columns of the vocabulary, got 9"),
        ({"vocab_size": 8.0}, TypeError, "vocab_size: expected an int, got float"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an int, got float"),
        ({"ignore_index": True}, TypeError, "ignore_index: expected an int, got bool"),
        ({"ignore_index": 2**63}, ValueError, "ignore_index: expected a 64-bit integer"),
        ({"check_targets": 1}, TypeError, "check_targets: expected a bool, got int"),
        ({"ignored_index": 0}, TypeError, "unexpected keyword 'ignored_index': expected a field of LossOptions"),
        ({"inplace": "yes"}, ValueError, """inplace: expected "auto", True or False, got 'yes'"""),
        ({"inplace": 1}, TypeError, 'inplace: expected "auto", True or False, got int'),
        ({"inplace": None}, TypeError, "inplace: .* got NoneType"),
        ({"options": {"label_smoothing": 0.1}}, TypeError, "options: expected a LossOptions, got dict"),
        ({"group": "tp"}, TypeError, "group: expected a torch.distributed.ProcessGroup, a 1-D DeviceMesh or None, got"),
        ({"shard": (0, 8, 8)}, TypeError, "shard: expected a VocabShard or None, got tuple"),
    ],
)
def test_wrong_options(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vocab_parallel_cross_entropy(_LOGITS, _TARGET, **fields)


def test_options_and_a_field_are_an_error() -> None:
    with pytest.raises(TypeError, match="options and 'label_smoothing' were both given"):
        vocab_parallel_cross_entropy(_LOGITS, _TARGET, options=LossOptions(), label_smoothing=0.1)


def test_others_smoothing_needs_another_class() -> None:
    with pytest.raises(ValueError, match='smoothing: "others" needs at least 2 classes'):
        vocab_parallel_cross_entropy(_LOGITS, _TARGET, label_smoothing=0.1, smoothing="others", vocab_size=1)
    # Without smoothing there is nothing to spread.
    vocab_parallel_cross_entropy(_LOGITS, _TARGET, smoothing="others", vocab_size=1)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (VocabShard(0, 3, 6), "expected logits with stop - start = 3 columns, got logits with 8 columns"),
        (VocabShard(4, 12, 12), "expected the first rank of the group to start at 0, got start=4"),
        (VocabShard(0, 8, 16), r"expected the last of 1 rank\(s\) to stop at size=16, got stop=8"),
    ],
)
def test_shards_that_are_not_this_ranks_part(shard: VocabShard, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vocab_parallel_cross_entropy(_LOGITS, _TARGET, shard=shard)


def test_reproducible_shards_end_at_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_ce.problem.REPRODUCIBLE_BLOCK", 4)
    resolve_problem.cache_clear()
    options = LossOptions(reproducible_tp=True)
    assert [ShardProblem.resolve(options, VocabShard(*bounds), 2).parts for bounds in ((0, 8, 10), (8, 10, 10))] == [
        3,
        3,
    ]
    assert ShardProblem.resolve(options, VocabShard(8, 16, 16), 2, equal_shards=True).parts == 2
    for bounds, name in (((0, 6, 12), "stop=6"), ((6, 12, 12), "start=6")):
        with pytest.raises(ValueError, match=f"reproducible_tp: expected .* multiples of 4 columns, got {name}"):
            ShardProblem.resolve(options, VocabShard(*bounds), 2)
    resolve_problem.cache_clear()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"z_loss_weight": 0.1}, "z_loss_weight"),
        ({"reduction": "sum"}, "reduction"),
    ],
)
def test_options_that_change_no_log_prob(fields: dict[str, Any], name: str) -> None:
    for keywords in (fields, {"options": LossOptions(**fields)}):
        with pytest.raises(ValueError, match=f"{name}: expected .*, as it changes no log-prob, got"):
            vocab_parallel_log_probs(_LOGITS, _TARGET, **keywords)
    with pytest.raises(TypeError, match="entropy: expected a bool, got int"):
        vocab_parallel_log_probs(_LOGITS, _TARGET, entropy=1)  # type: ignore[call-overload]


@pytest.mark.parametrize(("start", "stop", "size"), [(-1, 3, 6), (4, 3, 6), (0, 7, 6), (0, 0, 0)])
def test_shards_that_are_none(start: int, stop: int, size: int) -> None:
    with pytest.raises(ValueError, match="VocabShard: expected 0 <= start <= stop <= size"):
        VocabShard(start, stop, size)
    with pytest.raises(TypeError, match=r"VocabShard\.start: expected an int, got float"):
        VocabShard(0.0, 1, 1)  # type: ignore[arg-type]


def test_errors_come_before_any_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def collective(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective was issued")

    monkeypatch.setattr("te_ce.autograd.gather_statistics", collective)
    monkeypatch.setattr("te_ce.call.raise_for_faults", collective)
    with pytest.raises(AssertionError, match="a collective was issued"):
        vocab_parallel_cross_entropy(_LOGITS, _TARGET, check_targets=True)
    for keywords in ({"vocab_size": 9}, {"inplace": "yes"}, {"shard": VocabShard(0, 3, 6)}, {"reduction": "x"}):
        with pytest.raises(ValueError, match="expected"):
            vocab_parallel_cross_entropy(_LOGITS, _TARGET, check_targets=True, **keywords)  # type: ignore[arg-type]
    assert gather_statistics is not collective


def test_even_shards_need_a_group() -> None:
    with pytest.raises(TypeError, match=r"group: expected a torch.distributed.ProcessGroup, .* or None, got str"):
        VocabShard.even(10, "tp")  # type: ignore[arg-type]


def test_wrong_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_CE_CHECK_TARGETS", "yes")
    with pytest.raises(ValueError, match="TE_CE_CHECK_TARGETS: expected 0 or 1, got 'yes'"):
        vocab_parallel_cross_entropy(_LOGITS, _TARGET)
    monkeypatch.setenv("TE_CE_CHECK_TARGETS", "0")
    monkeypatch.setenv("TE_CE_BACKEND", "cuda")
    with pytest.raises(ValueError, match="TE_CE_BACKEND: expected one of auto, torch, triton, got 'cuda'"):
        vocab_parallel_cross_entropy(_LOGITS, _TARGET)


def test_the_options_object_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossOptions().reduction = "sum"  # type: ignore[misc]
    with pytest.raises(TypeError):
        LossOptions(-100)  # type: ignore[misc]
    assert LossOptions(label_smoothing=0.1) == LossOptions(label_smoothing=0.1)


def test_signatures() -> None:
    """The published call forms; a change here breaks callers."""
    assert str(inspect.signature(vocab_parallel_cross_entropy)) == (
        "(logits: 'Tensor', target: 'Tensor', *, group: 'Group' = None, "
        "options: 'LossOptions | None' = None, shard: 'VocabShard | None' = None, outputs: 'Iterable[str]' = (), "
        "inplace: 'Inplace' = 'auto', **loss_options: 'Any') -> 'Tensor | LossOutput'"
    )
    assert str(inspect.signature(vocab_parallel_log_probs)) == (
        "(logits: 'Tensor', target: 'Tensor', *, group: 'Group' = None, "
        "options: 'LossOptions | None' = None, shard: 'VocabShard | None' = None, inplace: 'Inplace' = 'auto', "
        "entropy: 'bool' = False, **loss_options: 'Any') -> 'Tensor | tuple[Tensor, Tensor]'"
    )
    assert str(inspect.signature(linear_cross_entropy)) == (
        "(hidden: 'Tensor', weight: 'Tensor', target: 'Tensor', *, bias: 'Tensor | None' = None, "
        "group: 'Group' = None, sequence_parallel: 'bool' = False, keep: 'Keep' = 'recompute', "
        "token_weights: 'Tensor | None' = None, options: 'LossOptions | None' = None, "
        "shard: 'VocabShard | None' = None, outputs: 'Iterable[str]' = (), **loss_options: 'Any') "
        "-> 'Tensor | LossOutput'"
    )
    assert [(field.name, field.default) for field in dataclasses.fields(LossOptions)] == [
        ("ignore_index", -100),
        ("label_smoothing", 0.0),
        ("smoothing", "uniform"),
        ("z_loss_weight", 0.0),
        ("softcap", None),
        ("scale", 1.0),
        ("vocab_size", None),
        ("reduction", "none"),
        ("check_targets", False),
        ("reproducible_tp", False),
    ]
    assert sorted(te_ce.__all__) == [
        "LinearCrossEntropyLoss",
        "LossOptions",
        "LossOutput",
        "VocabParallelCrossEntropyLoss",
        "VocabShard",
        "linear_cross_entropy",
        "vocab_parallel_cross_entropy",
        "vocab_parallel_log_probs",
    ]


_CHANGES = [
    ("ignore_index", {"ignore_index": 2}),
    ("label_smoothing", {"label_smoothing": 0.2}),
    ("smoothing", {"label_smoothing": 0.2, "smoothing": "others"}),
    ("z_loss_weight", {"z_loss_weight": 0.1}),
    ("softcap", {"softcap": 2.0}),
    ("scale", {"scale": 0.5}),
    ("vocab_size", {"vocab_size": 7}),
    ("reduction", {"reduction": "mean"}),
    ("check_targets", {"check_targets": True}),
    ("reproducible_tp", {"reproducible_tp": True}),
]


def test_every_option_is_tried() -> None:
    assert [name for name, _ in _CHANGES] == [field.name for field in dataclasses.fields(LossOptions)]


@pytest.mark.parametrize(("name", "fields"), _CHANGES)
def test_every_option_has_its_effect(name: str, fields: dict[str, Any]) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1, 2, 6])
    without = {key: value for key, value in fields.items() if key != name}
    if name == "check_targets":
        target[1] = 8
        with pytest.raises(IndexError):
            vocab_parallel_cross_entropy(logits, target, **fields)
        assert vocab_parallel_cross_entropy(logits, target, **without)[1].isnan()
        return
    if name == "reproducible_tp":
        # The value stays what it is; that the bits do not depend on the ranks is for other tests.
        shard = VocabShard(0, 8, 8)
        assert ShardProblem.resolve(LossOptions(**fields), shard).block > 0
        assert ShardProblem.resolve(LossOptions(**without), shard).block == 0
        return
    changed = vocab_parallel_cross_entropy(logits, target, **fields)
    plain = vocab_parallel_cross_entropy(logits, target, **without)
    assert changed.shape != plain.shape or not torch.equal(changed, plain)
    assert torch.equal(changed, vocab_parallel_cross_entropy(logits, target, options=LossOptions(**fields)))


def test_a_problem_counts_real_columns() -> None:
    options = LossOptions(vocab_size=10)
    problems = [ShardProblem.resolve(options, VocabShard(4 * r, 4 * r + 4, 16)) for r in range(4)]
    assert [problem.real_columns for problem in problems] == [4, 4, 2, 0]
    assert {problem.classes for problem in problems} == {10}
