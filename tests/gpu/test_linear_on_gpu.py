"""The linear loss on a GPU: GEMMs of cuBLAS, graphs, memory, and no waiting for the device."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, linear_cross_entropy
from te_ce.outputs import OUTPUTS
from tests.support.dense import dense_values
from tests.support.graphs import captured

_BF16 = torch.bfloat16

_MODES: list[dict[str, Any]] = [{}, {"keep": 0.5}, {"keep": 1.0}, {"token_weights": True}]


class _Layer(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    g: Tensor


def _layer(rows: int, features: int, columns: int, dtype: torch.dtype = _BF16, seed: int = 0) -> _Layer:
    random = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device="cuda")

    hidden = normal(rows, features).to(dtype).requires_grad_()
    weight = (normal(columns, features) / features**0.5).to(dtype).requires_grad_()
    target = torch.randint(columns, (rows,), generator=random, device="cuda")
    return _Layer(hidden, weight, target, torch.rand(rows, generator=random, device="cuda") + 0.5)


def _step(layer: _Layer, mode: dict[str, Any], reduction: str = "none", **keywords: Any) -> tuple[Tensor, ...]:
    hidden, weight, target, g = layer
    if mode.get("token_weights"):
        loss = linear_cross_entropy(hidden, weight, target, token_weights=g, reduction="sum", **keywords)
        upstream = torch.ones_like(loss)
    else:
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, **mode, **keywords)
        upstream = g if reduction == "none" else torch.ones_like(loss)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight), upstream)


def _truth(layer: _Layer, g: Tensor, options: LossOptions | None = None) -> tuple[Tensor, Tensor]:
    """Gradients in float64 from the same operands, the logits not rounded."""
    hidden, weight = (each.detach().double().requires_grad_() for each in layer[:2])
    loss = dense_values(hidden @ weight.t(), layer.target, options or LossOptions())["loss"]
    loss.backward(g.double())
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad, weight.grad


def _error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("mode", _MODES, ids=str)
def test_gradients_of_the_mean_are_exact_to_one_rounding(mode: dict[str, Any]) -> None:
    layer = _layer(2048, 1024, 32000)._replace(g=torch.full((2048,), 1 / 2048, device="cuda"))
    _, of_hidden, of_weight = _step(layer, mode)
    truth = _truth(layer, layer.g)
    assert _error(of_hidden, truth[0]) <= 0.002
    assert _error(of_weight, truth[1]) <= 0.003


@pytest.mark.parametrize("mode", _MODES, ids=str)
@pytest.mark.parametrize("columns", [50_257, 32_000])  # 50,257: chunks that end inside a vector
def test_gradients_under_any_upstream(mode: dict[str, Any], columns: int) -> None:
    """The gradient of the logits is rounded to bfloat16 for the GEMMs, and the result is."""
    layer = _layer(1024, 512, columns)
    _, of_hidden, of_weight = _step(layer, mode)
    truth = _truth(layer, layer.g)
    assert _error(of_hidden, truth[0]) <= 0.003
    assert _error(of_weight, truth[1]) <= 0.003


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_with_options(dtype: torch.dtype) -> None:
    layer, options = _layer(256, 128, 5000, dtype), LossOptions(label_smoothing=0.1, z_loss_weight=1e-3, softcap=8.0)
    hidden, weight, target, g = layer
    loss = linear_cross_entropy(hidden, weight, target, options=options)
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight), g)
    truth = _truth(layer, layer.g, options)
    bound = 2e-6 if dtype == torch.float32 else 1e-3
    assert _error(of_hidden, truth[0]) <= bound
    assert _error(of_weight, truth[1]) <= bound


def test_chunking_changes_no_more_than_a_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(1024, 512, 32000)
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", "40000")
    whole = _step(layer, {})
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", "3000")
    cut = _step(layer, {})
    torch.testing.assert_close(cut[0], whole[0], rtol=0, atol=2e-2)
    for got, expected in zip(cut[1:], whole[1:], strict=True):
        largest = expected.abs().amax(-1, keepdim=True).double()
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 8)
        assert ((got.double() - expected.double()).abs() <= unit).all()


@pytest.mark.parametrize("mode", _MODES, ids=str)
def test_the_same_bits_on_every_run(mode: dict[str, Any]) -> None:
    layer = _layer(1024, 512, 50_257)
    first = _step(layer, mode)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(_step(layer, mode), first, strict=True))


@pytest.mark.parametrize("mode", _MODES, ids=str)
def test_graph_replayed_with_new_data(mode: dict[str, Any]) -> None:
    layer = _layer(256, 128, 20_000)
    graph, results = captured(lambda: _step(layer, mode))
    for seed, ignored in ((1, 0), (2, 100), (3, 256)):
        other = _layer(256, 128, 20_000, seed=seed)
        other.target[:ignored] = -100
        with torch.no_grad():
            for static, new in zip(layer, other, strict=True):
                static.copy_(new)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, _step(layer, mode), strict=True))
        assert (results[1][:ignored] == 0).all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("mode", _MODES, ids=str)
def test_the_host_never_waits(mode: dict[str, Any]) -> None:
    layer = _layer(256, 128, 20_000)
    expected = _step(layer, mode)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = _step(layer, mode)
        if "token_weights" not in mode:
            linear_cross_entropy(
                layer.hidden, layer.weight, layer.target, outputs=OUTPUTS, **mode
            ).loss.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize(("mode", "chunks_at_once"), [({}, 1), ({"keep": 0.5}, 5), ({"keep": 1.0}, 8)], ids=str)
def test_memory(monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any], chunks_at_once: int) -> None:
    """Above the gradients that are returned: the chunks that exist at once, and hidden's gradient in float32."""
    monkeypatch.setenv("TE_CE_CHUNK_COLUMNS", "8192")
    layer = _layer(4096, 512, 65536)
    _step(layer, mode)
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests left in cycles must not go away within the measurement
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = _step(layer, mode)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    returned = sum(each.numel() * each.element_size() for each in results)
    chunk = 4096 * 8192 * 2
    of_hidden = 4096 * 512 * 4
    assert returned + chunks_at_once * chunk <= extra <= 1.02 * (returned + chunks_at_once * chunk + of_hidden)
