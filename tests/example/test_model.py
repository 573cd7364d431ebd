"""The attention core is causal attention, and Megatron's CPU view of torch changes the device and nothing else."""

import math

import pytest
import torch
from gpt import device, model
from gpt.config import Config, ConfigError


def test_attention_is_the_causal_softmax() -> None:
    torch.manual_seed(0)
    s, b, heads, dim = 7, 2, 3, 4
    query, key, value = (torch.randn(s, b, heads, dim, dtype=torch.float64) for _ in range(3))
    scores = torch.einsum("ibhd,jbhd->bhij", query, key) / math.sqrt(dim)
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf)
    expected = torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), value).reshape(s, b, heads * dim)
    got = model.SdpaAttention(config=None)(query, key, value, None)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    scaled = model.SdpaAttention(config=None, softmax_scale=0.1)(query, key, value, None)
    assert (scaled - expected).abs().max() > 1e-3


def test_cpu_view_of_torch() -> None:
    view = device._TorchOnCpu("torch")
    for made in (view.zeros([2], dtype=torch.int, device="cuda"), view.tensor([1.0], device="cuda")):
        assert made.device.type == "cpu"
    assert view.zeros(2, device="meta").device.type == "meta"
    assert view.cuda.current_device() == torch.device("cpu")
    assert view.Tensor is torch.Tensor
    assert view.cuda.is_available is torch.cuda.is_available


@pytest.mark.parametrize(("section", "key", "value"), [("model", "dtype", "bfloat16"), ("optimizer", "clip_grad", 1.0)])
def test_what_needs_a_gpu_is_refused_without_one(
    section: str, key: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = Config()
    device.check(config)
    setattr(getattr(config, section), key, value)
    with pytest.raises(ConfigError, match=f"{section}.{key}: expected .* without a GPU .*, found {value}"):
        device.check(config)


def test_peak_memory_is_in_mib() -> None:
    before = device.peak_memory(torch.device("cpu"))
    held = torch.ones(64 * 2**20 // 4 + int(before * 2**20 / 4))  # more than was ever resident
    assert device.peak_memory(torch.device("cpu")) >= before + 32
    del held
