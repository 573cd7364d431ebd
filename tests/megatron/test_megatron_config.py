"""Configurations that ask for te_ce in a way that would be dead, or for a loss that does not exist."""

from __future__ import annotations

import dataclasses

import megatron_gpt as gpt
import pytest
from megatron.core.model_parallel_config import ModelParallelConfig

import megatron_patch

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

HAS_FIELD = "cross_entropy_fusion_impl" in {f.name for f in dataclasses.fields(ModelParallelConfig)}
constructor = pytest.mark.skipif(not HAS_FIELD, reason="this release has no cross_entropy_fusion_impl field")


@constructor
def test_dead_flag_at_construction():
    megatron_patch.apply()
    with pytest.raises(ValueError, match="set cross_entropy_loss_fusion=True"):
        gpt.make_config(cross_entropy_fusion_impl="te_ce")
    gpt.make_config(cross_entropy_fusion_impl="te_ce", cross_entropy_loss_fusion=True)
    gpt.make_config(cross_entropy_fusion_impl="te")  # dead too, but Megatron's own affair
    megatron_patch.revert()
    gpt.make_config(cross_entropy_fusion_impl="te_ce")


@constructor
def test_hook_that_somebody_still_holds_checks_nothing():
    megatron_patch.apply()
    ours = ModelParallelConfig.__post_init__
    megatron_patch.revert()
    config = gpt.make_config(cross_entropy_fusion_impl="te_ce")
    assert ours(config) is None
    assert ModelParallelConfig.__post_init__ is not ours


@constructor
@pytest.mark.parametrize("value", ["te_ce_linear2", "te_ce2", "te-ce", "TE_CE"])
@pytest.mark.parametrize("fusion", [False, True])
def test_unknown_variant_at_construction(value, fusion):
    megatron_patch.apply()
    with pytest.raises(ValueError, match=f"cross_entropy_fusion_impl: expected .te_ce.*got '{value}'"):
        gpt.make_config(cross_entropy_fusion_impl=value, cross_entropy_loss_fusion=fusion)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("fusion", "value", "message"),
    [(False, "te_ce", "set cross_entropy_loss_fusion=True"), (True, "te_ce_line", "got 'te_ce_line'")],
)
def test_dead_flag_at_the_first_loss(fusion, value, message):
    model, batch = gpt.make_model(), gpt.make_batch(2, 4)
    model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = fusion, value
    megatron_patch.apply()
    with pytest.raises(ValueError, match=message):
        gpt.forward(model, batch, batch.labels)
