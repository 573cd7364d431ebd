"""Fixtures for the plugin's single-process tests; whatever a test applied is reverted after it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # megatron_gpt.py, whichever import mode pytest runs in


@pytest.fixture(scope="module")
def world():
    """One rank, with Megatron's groups."""
    import megatron_gpt

    with megatron_gpt.single_process(), torch.compiler.set_stance("force_eager"):  # Megatron's fused loss is compiled
        yield


@pytest.fixture(autouse=True)
def reverted():
    """Megatron's own objects after every test, the failed ones included."""
    import megatron_patch

    yield
    megatron_patch.revert()
    # Megatron's metrics of prediction heads have the length of the first model's.
    module = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    if module is not None:
        module.MTPLossLoggingHelper.tracker.clear()


@pytest.fixture
def asking():
    """A function that makes an already built model's configuration ask for te_ce."""

    def ask(model):
        model.config.cross_entropy_loss_fusion = True
        model.config.cross_entropy_fusion_impl = "te_ce"
        return model

    return ask
