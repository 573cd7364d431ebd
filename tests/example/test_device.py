"""How many ranks a machine can take."""

from __future__ import annotations

import pytest
import torch
from gpt import config as c
from gpt import device


@pytest.mark.parametrize(("ranks", "per_gpu", "fits"), [(2, 1, True), (3, 1, False), (4, 2, True), (5, 2, False)])
def test_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch, ranks: int, per_gpu: int, fits: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    config = c.Config(parallel=c.ParallelConfig(ranks_per_gpu=per_gpu))
    if fits:
        assert device.check(config) is None
        return
    with pytest.raises(c.ConfigError, match=rf"2 GPUs of this machine times .* = {per_gpu}, found {ranks}"):
        device.check(config)
