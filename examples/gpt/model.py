"""A GPT of megatron-core made of plain torch parts: no Transformer Engine, no Apex, so it runs anywhere.

Megatron's local layer spec with torch's norms; only its attention core is replaced, by torch's
scaled_dot_product_attention, which needs no mask tensor and no fused softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import Float16Module

from gpt.config import Config


class SdpaAttention(torch.nn.Module):
    """Causal attention over this rank's heads: query, key, value [s, b, heads, head_dim] -> [s, b, hidden_local]."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: Any, **also_unused: Any
    ) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def layer_spec() -> ModuleSpec:
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    return spec


def transformer_config(config: Config, tp: int, loss_fields: dict[str, Any]) -> TransformerConfig:
    """Megatron's configuration; `loss_fields` are the fields that choose the loss."""
    model = config.model
    bf16 = model.dtype == "bfloat16"
    return TransformerConfig(
        **loss_fields,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        tensor_model_parallel_size=tp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        # The full weight is drawn on the CPU and each rank keeps its part: the same model at any TP, on any device.
        use_cpu_initialization=True,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        # These fusions live in Apex and Transformer Engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def build(
    config: Config, tp: int, padded_vocab: int, loss_fields: dict[str, Any], device: torch.device
) -> DistributedDataParallel:
    """The model on `device`, in Megatron's DDP, its weights drawn from train.seed."""
    torch.manual_seed(config.train.seed)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(config.train.seed)
    model_config = transformer_config(config, tp, loss_fields)
    module: torch.nn.Module = GPTModel(
        config=model_config,
        transformer_layer_spec=layer_spec(),
        vocab_size=padded_vocab,
        max_sequence_length=config.model.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(device)
    if model_config.bf16:
        module = Float16Module(model_config, module)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(model_config, ddp_config, module)
    model.broadcast_params()
    model_config.finalize_model_grads_func = finalize_model_grads
    model_config.no_sync_func = model.no_sync
    return model
