"""Every mistake of a caller of the linear loss: an error that names the argument, what was expected and what it was."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import te_ce
from te_ce import LossOptions, VocabShard, counters, linear_cross_entropy

_HIDDEN, _WEIGHT, _TARGET = torch.zeros(3, 4), torch.zeros(8, 4), torch.zeros(3, dtype=torch.int64)
_META = torch.zeros(8, 4, device="meta")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"hidden": [[1.0]]}, TypeError, "hidden: expected a torch.Tensor, got list"),
        ({"weight": None}, TypeError, "weight: expected a torch.Tensor, got NoneType"),
        ({"target": [0]}, TypeError, "target: expected a torch.Tensor, got list"),
        ({"bias": 1.0}, TypeError, "bias: expected a torch.Tensor, got float"),
        ({"hidden": _HIDDEN.long()}, TypeError, "hidden: expected float32, bfloat16, float16 or float64, got int64"),
        ({"hidden": _HIDDEN.to(torch.float8_e4m3fn)}, TypeError, "hidden: .* got float8_e4m3fn"),
        ({"hidden": _HIDDEN.to(torch.complex64)}, TypeError, "hidden: .* got complex64"),
        ({"target": _TARGET.short()}, TypeError, "target: expected int64 or int32 class ids, got int16"),
        ({"target": _TARGET.bool()}, TypeError, "target: .* got bool"),
        (
            {"weight": _WEIGHT.bfloat16()},
            TypeError,
            "weight: expected float32, the dtype of hidden, got bfloat16; .*auto",
        ),
        ({"hidden": _HIDDEN.half()}, TypeError, "weight: expected float16, the dtype of hidden, got float32"),
        ({"bias": torch.zeros(8).double()}, TypeError, "bias: expected float32, the dtype of hidden, got float64"),
        ({"hidden": TwoTensor(_HIDDEN, _HIDDEN)}, TypeError, "hidden: expected a plain tensor, got TwoTensor"),
        ({"weight": TwoTensor(_WEIGHT, _WEIGHT)}, TypeError, "weight: expected a plain tensor, got TwoTensor"),
        (
            {"hidden": torch.tensor(1.0), "target": torch.tensor(0)},
            ValueError,
            "hidden: expected at least one dimension",
        ),
        ({"hidden": _HIDDEN[:, :0], "weight": _WEIGHT[:, :0]}, ValueError, r"hidden: .* 1 feature, got shape \(3, 0\)"),
        ({"weight": torch.zeros(8, 5)}, ValueError, r"weight: expected shape \[V_local, 4\].* got \(8, 5\)"),
        ({"weight": torch.zeros(4, 8)}, ValueError, r"weight: expected shape \[V_local, 4\].* got \(4, 8\)"),
        ({"weight": torch.zeros(4)}, ValueError, r"weight: expected shape \[V_local, 4\].* got \(4,\)"),
        ({"weight": torch.zeros(2, 8, 4)}, ValueError, r"weight: expected shape \[V_local, 4\].* got \(2, 8, 4\)"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias: expected shape \(8,\), one per row of weight, got \(4,\)"),
        ({"bias": torch.zeros(8, 1)}, ValueError, r"bias: expected shape \(8,\).* got \(8, 1\)"),
        ({"target": _TARGET[:2]}, ValueError, r"target: expected shape \(3,\), .* got \(2,\)"),
        ({"target": _TARGET[:, None]}, ValueError, r"target: expected shape \(3,\), .* got \(3, 1\)"),
        ({"target": _TARGET.to("meta")}, ValueError, "target: expected a dense tensor with storage"),
        ({"hidden": _HIDDEN.to("meta")}, ValueError, "hidden: expected a dense tensor with storage"),
        (
            {"weight": _META},
            ValueError,
            r"weight: expected a dense tensor with storage, got shape \(8, 4\), .* on meta",
        ),
        ({"bias": torch.zeros(8).to_sparse()}, ValueError, "bias: expected a dense tensor with storage"),
        # A weight that is not gathered yet.
        ({"weight": torch.zeros(0, 4)}, ValueError, r"weight: expected at least 1 row, got shape \(0, 4\); gather"),
        ({"weight": torch.zeros(0)}, ValueError, r"weight: expected shape \[V_local, 4\].* got \(0,\)"),
        ({"weight": _META[:0]}, ValueError, r"weight: .* got shape \(0, 4\), .* on meta"),
        (
            {"weight": torch.zeros(0, 4), "shard": VocabShard(0, 8, 8)},
            ValueError,
            r"weight: expected stop - start = 8 rows, as VocabShard\(.*\) declares, got shape \(0, 4\)",
        ),
        ({"shard": VocabShard(0, 4, 4)}, ValueError, r"weight: expected stop - start = 4 rows, .* got shape \(8, 4\)"),
        ({"shard": VocabShard(4, 12, 12)}, ValueError, "shard: expected the first rank of the group to start at 0"),
        ({"shard": VocabShard(0, 8, 16)}, ValueError, "shard: expected the last of 1 rank.* to stop at size=16"),
        ({"shard": (0, 8, 8)}, TypeError, "shard: expected a VocabShard or None, got tuple"),
        ({"group": "tp"}, TypeError, "group: "),
        ({"sequence_parallel": 1}, TypeError, "sequence_parallel: expected a bool, got int"),
        ({"outputs": "entropy"}, TypeError, r"outputs: .* got 'entropy'"),
        ({"outputs": ("logits",)}, ValueError, "outputs: expected .*, got 'logits' among them"),
        ({"options": {}}, TypeError, "options: expected a LossOptions, got dict"),
        ({"options": LossOptions(), "softcap": 1.0}, TypeError, "options and 'softcap' were both given"),
        ({"alpha": 0.1}, TypeError, "unexpected keyword 'alpha'"),
        ({"inplace": True}, TypeError, "unexpected keyword 'inplace'"),
        ({"label_smoothing": 1.0}, ValueError, r"label_smoothing: expected a number in \[0, 1\), got 1.0"),
        ({"vocab_size": 9}, ValueError, "vocab_size: expected at most the 8 columns of the vocabulary, got 9"),
        ({"reduction": "avg"}, ValueError, "reduction: expected one of none, sum, mean, got 'avg'"),
        ({"scale": torch.ones(2)}, ValueError, r"scale: expected shape \(3,\) on cpu, .* got \(2,\) on cpu"),
        ({"scale": torch.ones(3, requires_grad=True)}, ValueError, "scale: expected a tensor without requires_grad"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a finite number > 0 or None, got 0.0"),
        ({"reproducible_tp": True}, ValueError, "reproducible_tp: expected False for the linear loss.* got True; use"),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_wrong_arguments(changed: dict[str, Any], error: type[Exception], message: str, weighted: bool) -> None:
    arguments: dict[str, Any] = {"hidden": _HIDDEN, "weight": _WEIGHT, "target": _TARGET, **changed}
    if weighted and "target" not in changed:
        arguments = {"reduction": "sum", **arguments, "token_weights": torch.ones(3)}
        if "options" in arguments and isinstance(arguments["options"], LossOptions):
            arguments.pop("reduction")
        arguments = (
            arguments if "options" not in arguments else {k: v for k, v in arguments.items() if k != "reduction"}
        )
    before = counters.served()
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments)
    assert counters.served() == before


def test_a_scale_of_rows_that_cannot_be_one_is_found_where_it_is_checked() -> None:
    with pytest.raises(ValueError, match=r"scale: rank 0 has 1 row\(s\) whose scale is 0, infinite or NaN"):
        linear_cross_entropy(_HIDDEN, _WEIGHT, _TARGET, scale=torch.tensor([1.0, 0.0, 1.0]), check_targets=True)


def test_others_smoothing_needs_another_class() -> None:
    with pytest.raises(ValueError, match='smoothing: "others" needs at least 2 classes'):
        linear_cross_entropy(_HIDDEN, _WEIGHT[:1], _TARGET, label_smoothing=0.1, smoothing="others")


def test_sequence_parallel_on_one_rank_is_no_other_call() -> None:
    loss = linear_cross_entropy(_HIDDEN, _WEIGHT, _TARGET, sequence_parallel=True)
    assert torch.equal(loss, linear_cross_entropy(_HIDDEN, _WEIGHT, _TARGET))


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", " ", "٣"])
@pytest.mark.parametrize("name", ["TE_CE_CHUNK_COLUMNS", "TE_CE_CHUNK_TOKENS"])
def test_wrong_environment_variables(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name}: expected a positive integer, got '{value}'"):
        linear_cross_entropy(_HIDDEN, _WEIGHT, _TARGET, token_weights=torch.ones(3), reduction="sum")


def test_an_empty_environment_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    keywords = {"token_weights": torch.ones(3), "reduction": "sum"}
    expected = linear_cross_entropy(_HIDDEN, _WEIGHT, _TARGET, **keywords)
    for name in ("TE_CE_CHUNK_COLUMNS", "TE_CE_CHUNK_TOKENS"):
        monkeypatch.setenv(name, "")
    assert torch.equal(linear_cross_entropy(_HIDDEN, _WEIGHT, _TARGET, **keywords), expected)


def test_checked_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_CE_CHECK_TARGETS", "1")
    with pytest.raises(IndexError, match="target: rank 0 has 3 bad row"):
        linear_cross_entropy(_HIDDEN, _WEIGHT, _TARGET + 8)


@pytest.mark.parametrize("requested", ["cuda", "triton"])
def test_a_backend_that_cannot_serve(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_CE_BACKEND", requested)
    with pytest.raises(ValueError, match="TE_CE_BACKEND"):
        linear_cross_entropy(_HIDDEN.double(), _WEIGHT.double(), _TARGET)


def test_the_signature() -> None:
    parameters = inspect.signature(te_ce.linear_cross_entropy).parameters
    assert list(parameters) == [
        *("hidden", "weight", "target", "bias", "group", "sequence_parallel", "keep", "token_weights", "options"),
        *("shard", "outputs", "loss_options"),
    ]
    assert [each.kind for each in parameters.values()][:3] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 3
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in list(parameters.values())[3:-1])
    defaults = [each.default for each in list(parameters.values())[3:-1]]
    assert defaults == [None, None, False, "recompute", None, None, None, ()]
    assert "linear_cross_entropy" in te_ce.__all__
