"""The benchmark of options: every option and output is measured, and a wrong one is refused before it is timed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from benchmarks import options
from benchmarks.measure import Bandwidth
from te_ce import LossOptions, LossOutput
from te_ce.outputs import OUTPUTS


@pytest.fixture(autouse=True)
def _small_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_CE_BACKEND", "torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(options, "bandwidth", lambda device: Bandwidth(4e9, 5e9))


def test_every_option_and_output_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    ratios = options.main(["--shape", "8x48", "--runs", "2"])
    assert list(ratios) == [variant.name for variant in options.VARIANTS]
    assert ratios["plain"] == 1.0
    assert "8 x 48 bfloat16" in capsys.readouterr().out
    asked = {name for variant in options.VARIANTS for name in variant.outputs}
    assert asked == set(OUTPUTS)
    given = {name for variant in options.VARIANTS for name in variant.options}
    cheap = {"ignore_index", "smoothing", "vocab_size", "reduction", "check_targets"}
    assert given == {field.name for field in dataclasses.fields(LossOptions)} - cheap


@pytest.mark.parametrize("name", ["loss", *OUTPUTS])
def test_a_wrong_value_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = options.vocab_parallel_cross_entropy

    def wrong(logits: Tensor, target: Tensor, **keywords: object) -> Tensor | LossOutput:
        result = right(logits, target, **keywords)
        if logits.dtype == torch.float64 or not isinstance(result, LossOutput):
            return result
        return result._replace(**{name: getattr(result, name) + 1})

    monkeypatch.setattr(options, "vocab_parallel_cross_entropy", wrong)
    with pytest.raises(AssertionError, match=f"{name} is off by"):
        options.main(["--shape", "8x48", "--runs", "2", "--only", "all outputs"])


def test_a_wrong_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = options.backward

    def wrong(result: LossOutput, upstream: Tensor) -> None:
        right(result, upstream * 1.1 if result.loss.dtype != torch.float64 else upstream)

    monkeypatch.setattr(options, "backward", wrong)
    with pytest.raises(AssertionError, match="the gradient is off by"):
        options.main(["--shape", "8x48", "--runs", "2", "--only", "softcap"])
