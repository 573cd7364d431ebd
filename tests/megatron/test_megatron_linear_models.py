"""`te_ce_linear` on Megatron's other language models: state-space and hybrid ones, and T5 with the bias of its head."""

from __future__ import annotations

import importlib
import inspect
import warnings

import megatron_gpt as gpt
import pytest
import torch
from fused_head import ask, check_grads, heads
from megatron.core.transformer.spec_utils import ModuleSpec

import megatron_patch

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:::megatron")]


class Stack(torch.nn.Module):
    """In the place of the layers, which need kernels: one linear map of [s, b, H]."""

    def __init__(self, config, *_, **__):
        super().__init__()
        self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, *_, **__):
        return self.linear(hidden_states).tanh()

    def set_input_tensor(self, _):
        pass


def stack_model(kind, tied):
    module, name, spec = kind
    model_class = getattr(importlib.import_module(f"megatron.core.models.{module}"), name)
    taken = inspect.signature(model_class.__init__).parameters
    arguments = {spec: ModuleSpec(module=Stack)}
    if "hybrid_layer_pattern" in taken:
        arguments["hybrid_layer_pattern"] = "M"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(
            config=gpt.make_config(),
            vocab_size=gpt.VOCAB,
            max_sequence_length=32,
            share_embeddings_and_output_weights=tied,
            **arguments,
        )
    return gpt.enlarge(model)


KINDS = {
    "Mamba": ("mamba.mamba_model", "MambaModel", "mamba_stack_spec"),
    "Hybrid": ("hybrid.hybrid_model", "HybridModel", "hybrid_stack_spec"),
}


def exists(module):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(importlib.import_module(f"megatron.core.models.{module}"))
    except ImportError:
        return False


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_stacks(kind, tied):
    if not exists(kind[0]):
        pytest.skip("this release has no such model")
    torch.manual_seed(0)
    model, batch = stack_model(kind, tied), gpt.make_batch(2, 8)
    loss, expected = gpt.loss_and_grads(model, batch, gpt.mean)
    megatron_patch.apply(strict=True)
    found, grads = gpt.loss_and_grads(ask(model), batch, gpt.mean)
    assert heads() == {"fused": 1}
    torch.testing.assert_close(found, loss, rtol=0, atol=1e-5)
    check_grads(grads, expected)


def t5(tied):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.models import T5
        from megatron.core.models.T5 import t5_spec

        try:
            encoder = t5_spec.get_t5_encoder_with_local_block_spec(1)
            decoder = t5_spec.get_t5_decoder_with_local_block_spec(1)
        except NameError:
            pytest.skip("this release's T5 needs Transformer Engine, or Apex")
        for block in (encoder, decoder):
            for layer in block.layer_specs:
                for part in ("self_attention", "cross_attention"):
                    attention = getattr(layer.submodules, part, None)
                    if getattr(attention, "submodules", None) is not None:
                        attention.submodules.core_attention = gpt.PlainAttention
        config = gpt.make_config()
        model = T5.T5Model(
            config=config,
            encoder_config=config,
            transformer_encoder_layer_spec=encoder,
            transformer_decoder_layer_spec=decoder,
            vocab_size=gpt.VOCAB,
            max_sequence_length=32,
            share_embeddings_and_output_weights=tied,
        )
    with torch.no_grad():
        if model.lm_head.output_layer.bias is not None:
            model.lm_head.output_layer.bias.normal_()
    return gpt.enlarge(model)


@pytest.mark.parametrize("tied", [False, True], ids=["untied, without bias", "tied, with bias"])
def test_t5(tied):
    torch.manual_seed(0)
    model, batch = t5(tied), gpt.make_batch(2, 8, (-100,))
    assert (model.lm_head.output_layer.bias is not None) == tied
    mask = torch.zeros(2, 1, 8, 8, dtype=torch.bool)

    def run():
        model.zero_grad(set_to_none=True)
        loss = model(batch.tokens, batch.tokens, mask, mask, mask, batch.labels)
        gpt.masked_sum(loss, batch.mask).backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    loss, expected = run()
    megatron_patch.apply(strict=True)
    ask(model)
    found, grads = run()
    assert heads() == {"fused": 1}
    torch.testing.assert_close(found * batch.mask, loss * batch.mask, rtol=0, atol=2e-5)
    check_grads(grads, expected)
    if tied:
        assert grads["lm_head.output_layer.bias"].any()
