"""Checked calls over real ranks: whatever is wrong on one of them is an error on all, and none waits for another."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode

from te_ce import LossOptions, VocabShard, vocab_parallel_cross_entropy, vocab_parallel_log_probs
from te_ce.record import RECORD_BYTES
from tests.support.subject import Subject

# A call on this many ranks, of which only the last one is odd: what changes there in the arguments of the call.
_Change = Callable[[dict[str, Any], int], None]


@pytest.fixture(scope="module")
def group(tp_group: ProcessGroup) -> Iterator[ProcessGroup]:
    """All ranks; one that waits in vain fails soon."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    yield group
    dist.destroy_process_group(group)


@pytest.fixture
def device(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """This rank's, where the twin serves: what is checked here comes before any kernel."""
    monkeypatch.setenv("TE_CE_BACKEND", "torch")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=["option", "environment"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keywords of a checked call."""
    if request.param == "option":
        return {"check_targets": True}
    monkeypatch.setenv("TE_CE_CHECK_TARGETS", "1")
    return {}


def _arguments(device: torch.device, group: ProcessGroup) -> dict[str, Any]:
    """6 rows, 4 columns a rank."""
    return {
        "logits": torch.zeros(2, 3, 4, device=device),
        "target": torch.tensor([[0, 1, 2], [-100, 4, 5]], device=device),
        "group": group,
    }


def _outcomes(call: Callable[[], object], group: ProcessGroup) -> list[tuple[str, str]]:
    """Type and text of the error of every rank, on every rank; and the group has come through it."""
    try:
        call()
    except Exception as error:
        mine = (type(error).__name__, str(error))
    else:
        mine = ("", "")
    one = torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(one, group=group)
    assert one.item() == group.size()
    outcomes: list[Any] = [None] * group.size()
    dist.all_gather_object(outcomes, mine, group=group)
    return outcomes


def _with_other(name: str, value: Any) -> _Change:
    return lambda arguments, ranks: arguments.__setitem__(name, value)


def _reshaped(*shape: int) -> _Change:
    def change(arguments: dict[str, Any], ranks: int) -> None:
        arguments["logits"] = arguments["logits"].reshape(*shape, 4)
        arguments["target"] = arguments["target"].reshape(shape)

    return change


def _fewer_rows(arguments: dict[str, Any], ranks: int) -> None:
    arguments["logits"], arguments["target"] = arguments["logits"][:, 1:], arguments["target"][:, 1:]


def _cast(name: str, dtype: torch.dtype) -> _Change:
    return lambda arguments, ranks: arguments.__setitem__(name, arguments[name].to(dtype))


def _narrower(arguments: dict[str, Any], ranks: int) -> None:
    arguments["logits"] = arguments["logits"][..., :3]


def _in_shard(width: int, before_the_end: int, size: int) -> _Change:
    """The last rank declares a shard of `width` columns, others than the ones that the equal shards leave to it."""

    def change(arguments: dict[str, Any], ranks: int) -> None:
        whole = 4 * ranks + size
        arguments["logits"] = arguments["logits"].new_zeros(2, 3, width)
        arguments["shard"] = VocabShard(whole - before_the_end, whole, whole)

    return change


_DISAGREEMENTS: dict[str, tuple[_Change, str]] = {
    "rows": (_fewer_rows, r"target.shape: .*, got \(2, 3\) on rank 0, .*\(2, 2\) on rank {last}"),
    "leading_dims": (_reshaped(6), r"target.shape: .*, got \(2, 3\) on rank 0, .*\(6,\) on rank {last}"),
    "logits_dtype": (_cast("logits", torch.bfloat16), r"logits.dtype: .* torch.bfloat16 on rank {last}"),
    "target_dtype": (_cast("target", torch.int32), r"target.dtype: .* torch.int32 on rank {last}"),
    "ignore_index": (_with_other("ignore_index", 3), "ignore_index: .* got -100 on rank 0, .*3 on rank {last}"),
    "label_smoothing": (_with_other("label_smoothing", 0.25), "label_smoothing: .* got 0 on .* 0.25 on rank {last}"),
    "smoothing": (_with_other("smoothing", "others"), "smoothing: .* got 'uniform' on .* 'others' on rank {last}"),
    "vocab_size": (_with_other("vocab_size", 7), "vocab_size: .* got None on .* 7 on rank {last}"),
    "reduction": (_with_other("reduction", "mean"), "reduction: .* got 'none' on .* 'mean' on rank {last}"),
    "z_loss_weight": (_with_other("z_loss_weight", 1e-4), "z_loss_weight: .* got 0 on .* 0.0001 on rank {last}"),
    "softcap": (_with_other("softcap", 30), "softcap: .* got None on .* 30 on rank {last}"),
    "scale": (_with_other("scale", 0.5), "scale: .* got 1 on .* 0.5 on rank {last}"),
    "scale_of_rows": (
        lambda arguments, ranks: arguments.update(scale=torch.ones(2, 3, device=arguments["logits"].device)),
        "scale: .* got 1 on .* tensor on rank {last}",
    ),
    "outputs": (_with_other("outputs", ["lse"]), r"outputs: .* got \(\) on .* \('lse',\) on rank {last}"),
    # The same one is named on every rank.
    "several": (
        lambda arguments, ranks: arguments.update(
            target=arguments["target"].int(), reduction="sum", label_smoothing=0.25, smoothing="others", vocab_size=7
        ),
        "target.dtype: .* torch.int32 on rank {last}",
    ),
    "widths": (_narrower, "logits: expected as many columns on every rank .* got 4 on rank 0, .*3 on rank {last}"),
    "vocabulary": (_in_shard(5, 5, 1), r"shard: expected the same size .* got {size} on rank 0.* on rank {last}"),
    "a_hole": (_in_shard(3, 3, 0), r"shard: expected shards that follow .* got \[0, 4\) on rank 0, .* on rank {last}"),
    "twice": (_in_shard(5, 5, 0), r"shard: expected shards that follow .* got \[0, 4\) on rank 0, .* on rank {last}"),
    "bad_target": (
        lambda arguments, ranks: arguments["target"][1].fill_(4 * ranks),
        "target: rank {last} has 3 bad row.*, the first is row 3 with target {size}: expected 0 <= target < {size} ",
    ),
}

# What one rank finds by itself.
_ERRORS: dict[str, tuple[_Change, str]] = {
    "shape": (
        lambda arguments, ranks: arguments.__setitem__("target", arguments["target"][:1]),
        r"ValueError: target: expected shape \(2, 3\), .* got \(1, 3\)",
    ),
    "dtype": (_cast("target", torch.float32), "TypeError: target: expected int64 or int32 class ids, got float32"),
    "no_tensor": (_with_other("logits", 1.0), "TypeError: logits: expected a torch.Tensor, got float"),
    "option": (_with_other("label_smoothing", 2.0), r"ValueError: label_smoothing: expected a number in .* got 2.0"),
    "keyword": (_with_other("alpha", 2.0), "TypeError: unexpected keyword 'alpha'"),
    "twice": (
        lambda arguments, ranks: arguments.update(options=LossOptions(check_targets=True), reduction="sum"),
        "TypeError: options and '.*' were both given",
    ),
    "vocab_size": (_with_other("vocab_size", 10**6), "ValueError: vocab_size: expected at most"),
    "outputs": (_with_other("outputs", ["logits"]), "ValueError: outputs: expected"),
    "scale_of_rows": (
        lambda arguments, ranks: arguments.update(scale=torch.ones(2, 1, device=arguments["logits"].device)),
        "ValueError: scale: expected",
    ),
    "inplace": (_with_other("inplace", "no"), "ValueError: inplace: expected"),
    "shard": (_with_other("shard", (0, 4)), "TypeError: shard: expected a VocabShard or None, got tuple"),
    "long": (_with_other("reduction", "\N{GREEK SMALL LETTER ALPHA}" * RECORD_BYTES), "ValueError: reduction: .* got"),
}


@pytest.mark.parametrize("name", list(_DISAGREEMENTS))
def test_ranks_that_disagree(device: torch.device, group: ProcessGroup, checked: dict[str, Any], name: str) -> None:
    change, expected = _DISAGREEMENTS[name]
    last, size = group.size() - 1, 4 * group.size()
    arguments = _arguments(device, group) | checked
    if dist.get_rank(group) == last:
        change(arguments, group.size())
    outcomes = _outcomes(lambda: vocab_parallel_cross_entropy(**arguments), group)
    assert len(set(outcomes)) == 1, outcomes
    kind, text = outcomes[0]
    assert kind == ("IndexError" if name == "bad_target" else "ValueError")
    assert re.match(expected.format(last=last, size=size), text), text
    assert vocab_parallel_cross_entropy(**_arguments(device, group), **checked).isfinite().all()


@pytest.mark.parametrize("odd", [0, -1])
@pytest.mark.parametrize("name", list(_ERRORS))
def test_an_error_of_one_rank_reaches_the_others(
    device: torch.device, group: ProcessGroup, checked: dict[str, Any], name: str, odd: int
) -> None:
    change, expected = _ERRORS[name]
    odd %= group.size()
    arguments = _arguments(device, group) | checked
    if dist.get_rank(group) == odd:
        change(arguments, group.size())
    outcomes = _outcomes(lambda: vocab_parallel_cross_entropy(**arguments), group)
    kind, text = outcomes.pop(odd)
    assert re.match(expected, f"{kind}: {text}"), (kind, text)
    assert len(set(outcomes)) == 1, outcomes
    assert outcomes[0][0] == "RuntimeError"
    told, _, cut = outcomes[0][1].partition(f"but rank {odd} raised ")
    assert told == "group: expected every rank to compute the loss, "
    assert cut == f"{kind}: {text}" if len(text) < 500 else f"{kind}: {text}".startswith(cut)
    assert len(cut) > 20
    assert vocab_parallel_cross_entropy(**_arguments(device, group), **checked).isfinite().all()


@pytest.mark.parametrize("wrong", [{"entropy": "yes"}, {"reduction": "mean"}], ids=str)
def test_log_probs_of_a_rank_that_raises(
    device: torch.device, group: ProcessGroup, checked: dict[str, Any], wrong: dict[str, Any]
) -> None:
    arguments = _arguments(device, group) | checked
    odd = dist.get_rank(group) == 0
    outcomes = _outcomes(lambda: vocab_parallel_log_probs(**arguments, **wrong if odd else {}), group)
    (kind, text), *others = outcomes
    assert text.startswith(f"{min(wrong)}: expected ")
    expected = f"group: expected every rank to compute the loss, but rank 0 raised {kind}: {text}"
    assert set(others) == {("RuntimeError", expected)}


def test_every_rank_has_an_error_of_its_own(device: torch.device, group: ProcessGroup, checked: dict[str, Any]) -> None:
    arguments = _arguments(device, group) | checked
    rank = dist.get_rank(group)
    outcomes = _outcomes(lambda: vocab_parallel_cross_entropy(**arguments, label_smoothing=2.0 + rank), group)
    for each, (kind, text) in enumerate(outcomes):
        assert kind == "ValueError"
        assert text.endswith(f"got {2.0 + each}")


def test_one_record_is_exchanged_where_calls_are_checked(
    device: torch.device, group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TE_CE_CHECK_TARGETS", raising=False)
    for check_targets, collectives in ((False, 1), (True, 2)):
        with CommDebugMode() as mode:
            vocab_parallel_cross_entropy(**_arguments(device, group), check_targets=check_targets)
        assert mode.get_total_counts() == collectives, mode.get_comm_counts()


_COMPILED = {name: _DISAGREEMENTS[name] for name in ("rows", "label_smoothing", "widths", "bad_target")}


@pytest.mark.parametrize("name", [*_COMPILED, "vocab_size"])
def test_compiled(device: torch.device, group: ProcessGroup, name: str) -> None:
    change, expected = (_COMPILED | {"vocab_size": _ERRORS["vocab_size"]})[name]
    last, size = group.size() - 1, 4 * group.size()
    arguments = _arguments(device, group)
    if dist.get_rank(group) == last:
        change(arguments, group.size())
    logits, target = arguments.pop("logits"), arguments.pop("target")

    def step(logits: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, target, check_targets=True, **arguments)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    outcomes = _outcomes(lambda: compiled(logits, target), group)
    if name == "vocab_size":
        kind, text = outcomes.pop()
        assert re.match(expected, f"{kind}: {text}"), (kind, text)
        expected = f"group: .* but rank {last} raised {expected}"
    assert len(set(outcomes)) == 1, outcomes
    assert re.match(expected.format(last=last, size=size), outcomes[0][1]), outcomes


def test_a_compiled_rank_agrees_with_eager_ones(device: torch.device, group: ProcessGroup) -> None:
    def step(logits: Tensor, target: Tensor) -> Tensor:
        options = LossOptions(check_targets=True, label_smoothing=0, softcap=30, scale=2, reduction="mean")
        return vocab_parallel_cross_entropy(logits, target, group=group, options=options, outputs=["lse"]).loss

    torch._dynamo.reset()
    one = dist.get_rank(group) == 0
    arguments = _arguments(device, group)
    loss = (torch.compile(step, backend="aot_eager", fullgraph=True) if one else step)(
        arguments["logits"], arguments["target"]
    )
    assert loss.isfinite()


@pytest.mark.parametrize("argument", ["target", "scale"])
def test_values_that_differ(subject: Subject, tp_group: ProcessGroup, argument: str) -> None:
    """Valid ones on every rank, of which no rank alone can tell that another has others."""
    rank = dist.get_rank(tp_group)
    logits = torch.zeros(3, 8, device=subject.device)
    target = torch.tensor([1, 2, 3], device=subject.device)
    scale = torch.tensor([1.0, 2.0, 3.0], device=subject.device)
    if rank == 1:
        target, scale = (target.flip(0), scale) if argument == "target" else (target, scale.flip(0))
    with pytest.raises(ValueError, match=f"{argument}: expected the same values on every rank"):
        subject.loss(logits, target, group=tp_group, scale=scale, check_targets=True)
    target[0], scale[:] = 1, 1.0
    if argument == "target":
        target[2] = 3
    loss = subject.loss(logits, target, group=tp_group, scale=scale, check_targets=True)
    assert loss.isfinite().all()
