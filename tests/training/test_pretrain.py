"""Megatron's own `pretrain`, on a CPU: the same run with te_ce as without, and te_ce served it.

Losses and gradient norms are compared as Megatron prints them, seven and four digits, up to the last one, at every
iteration, in validation and in the test at the end. Four iterations of two micro-batches, and three times two
micro-batches of evaluation.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.training.conftest import Run, Train

TRAINED, EVALUATED = 4 * 2, 3 * 2
TP = "--tensor-model-parallel-size 2"


def check_same(ours: Run, theirs: Run, served: int) -> None:
    assert list(ours.losses) == list(theirs.losses) == [1, 2, 3, 4]
    for number, values in theirs.losses.items():
        check_printed(ours.losses[number], values)
    assert ours.evaluated == pytest.approx(theirs.evaluated, rel=0, abs=1.5e-6)
    assert len(ours.evaluated) == 2
    assert max(ours.served) == served
    assert theirs.served == []


def check_printed(ours: dict[str, float], theirs: dict[str, float]) -> None:
    assert ours.keys() == theirs.keys() >= {"lm loss", "grad norm"}
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=0, abs=1.5e-3 if name == "grad norm" else 1.5e-6)


@pytest.mark.parametrize("loss", ["te_ce", "te_ce_linear"])
def test_tensor_parallel(train: Train, plain: Train, loss: str) -> None:
    more = f"{TP} --te-ce-strict" if loss == "te_ce_linear" else TP
    ours = train(loss, more)
    check_same(ours, plain(TP), TRAINED + EVALUATED)
    dump = dict(re.findall(r"^ +(\w+) \.+ (.*)$", ours.text, re.MULTILINE))
    assert (dump["cross_entropy_loss_fusion"], dump["cross_entropy_fusion_impl"]) == ("True", loss)
    assert dump["te_ce_label_smoothing"] == "None"
    path = "fused with the output layer" if loss == "te_ce_linear" else "computed on logits"
    assert ours.text.count(f"megatron_patch: {loss}: the loss is {path}") == 1


def test_an_option_of_the_command_line(train: Train, plain: Train) -> None:
    """The z-loss of a model that knows nothing yet: about 0.1 (log 1000)^2."""
    ours = train("te_ce_linear", f"{TP} --te-ce-z-loss-weight 0.1", iterations=1)
    first, without = (run.losses[1]["lm loss"] for run in (ours, plain(TP)))
    assert first - without == pytest.approx(0.1 * without**2, rel=0.02)


def test_checkpoint(train: Train, plain: Train, tmp_path: Path) -> None:
    """Saved in the middle and resumed: the second half is that of the run without interruption."""
    # On a CPU the loaders draw from the random state that dropout would go on with.
    without_dropout = f"{TP} --hidden-dropout 0 --attention-dropout 0"
    saved = f"{without_dropout} --ckpt-format torch --save-interval 2"
    whole = train("te_ce_linear", f"{saved} --save {tmp_path}")
    resumed = train("te_ce_linear", f"{saved} --load {tmp_path} --ckpt-step 2")
    assert list(resumed.losses) == [3, 4]
    # The loss that Megatron prints after that averages over all iterations since.
    assert resumed.losses[3] == whole.losses[3]
    assert resumed.losses[4]["grad norm"] == whole.losses[4]["grad norm"]
    assert resumed.evaluated == whole.evaluated
    check_same(whole, plain(without_dropout), TRAINED + EVALUATED)
    assert max(resumed.served) == TRAINED // 2 + EVALUATED


def test_pipeline_and_data_of_ones_own(train: Train, plain: Train, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The last stage serves all losses, and says so; the first one none."""
    how = {
        "more": "--pipeline-model-parallel-size 2 --split 80,10,10",
        "data": f"--data-path {_indexed_data(tmp_path_factory.mktemp('data'))}",
    }
    ours = train("te_ce_linear", **how)
    check_same(ours, plain(**how), TRAINED + EVALUATED)
    assert sorted(ours.served) == [0, TRAINED + EVALUATED]


def _indexed_data(folder: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{folder}/text.bin", dtype=np.int32)
    random = np.random.default_rng(0)
    for _ in range(100):
        length = int(random.integers(20, 60))
        builder.add_document(random.integers(0, 999, length), [length])
    builder.finalize(f"{folder}/text.idx")
    return f"{folder}/text"


def test_heads_of_multi_token_prediction_and_the_loss_per_token(train: Train, plain: Train) -> None:
    more = f"{TP} --mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion --calculate-per-token-loss"
    ours = train("te_ce_linear", more)
    # The head's loss is computed in training, and in evaluation as well.
    check_same(ours, plain(more), 2 * (TRAINED + EVALUATED))
    assert any("mtp" in each for each in ours.losses[1])


@pytest.mark.parametrize("loss", ["te_ce", "te_ce_linear"])
def test_deterministic_mode(train: Train, plain: Train, loss: str) -> None:
    """Megatron refuses every fused loss in it; its own unfused one is what te_ce is compared with."""
    more = f"{TP} --deterministic-mode --attention-backend unfused"
    ours = train(loss, more)
    check_same(ours, plain(more), TRAINED + EVALUATED)
    assert ours.text.count("validate_args is shown cross_entropy_loss_fusion=False") == 1
