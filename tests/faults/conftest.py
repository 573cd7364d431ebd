"""Fixtures of the tests that stay in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))


@pytest.fixture
def model_world() -> Iterator[None]:
    """One rank, with Megatron's groups, and its own objects afterwards."""
    import megatron_gpt

    import megatron_patch

    with megatron_gpt.single_process(), torch.compiler.set_stance("force_eager"):
        yield
    megatron_patch.revert()
