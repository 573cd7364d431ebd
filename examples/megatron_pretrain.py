"""A GPT through Megatron's own training program; knows nothing of te_ce.

    torchrun --nproc-per-node 2 -m megatron_patch examples/megatron_pretrain.py --tensor-model-parallel-size 2 \
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl te_ce [Megatron's arguments]

needs a megatron-core that ships `megatron.training` (0.17 or later, which ask for Python 3.12). docs/megatron.md has a
complete command. Data: `--mock-data`, or `--data-path PREFIX` for indexed files. Without `--transformer-impl local` the
layers are Transformer Engine's. Context parallelism and mixtures of experts are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split

try:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
except ImportError:  # 0.17
    from megatron.training.tokenizer import build_tokenizer

DEFAULTS = {"tokenizer_type": "NullTokenizer"}


def provide_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """This rank's part of the model: the embedding on the first pipeline stage, the output layer on the last."""
    args = get_args()
    config = config or _transformer_config(args)
    uses_te = args.transformer_impl == "transformer_engine"
    if uses_te:
        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = get_gpt_layer_local_spec(normalization=args.normalization)
    heads = None
    if args.mtp_num_layers:
        heads = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=uses_te, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=heads,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def _transformer_config(args: Any) -> Any:
    if args.yaml_cfg is None:
        return core_transformer_config_from_args(args)
    from megatron.training.yaml_arguments import core_transformer_config_from_yaml

    return core_transformer_config_from_yaml(args, "language_model")


def provide_datasets(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test set, on every rank: those of a tensor-parallel group read the same samples."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    train, valid, test = BlendedMegatronDatasetBuilder(kind, samples, lambda: True, config).build()
    return train, valid, test


# Megatron otherwise builds the loaders on the first rank of a tensor-parallel group only.
provide_datasets.is_distributed = True  # type: ignore[attr-defined]


def step_forward(data: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    """The loss per token [b, s] (on other stages than the last one, hidden states), and what makes a number of it."""
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data).items() if torch.is_tensor(value)}
    mask = batch["loss_mask"]
    arguments: dict[str, Any] = {"labels": batch["labels"]}
    if get_args().mtp_num_layers:
        arguments["loss_mask"] = mask
    output = model(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), **arguments)
    return output, partial(_sum_of_losses, mask)


def _sum_of_losses(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum over the tokens that count, their number, and both for the log: Megatron divides."""
    mask = mask.flatten().float()
    loss = (losses.flatten().float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def _take_the_wheels_helpers() -> None:
    """A wheel holds the data sets' helpers compiled, but no Makefile, without which Megatron would end the run."""
    from megatron.core.datasets import utils

    if not (Path(utils.__file__).parent / "Makefile").exists():
        utils.compile_helpers = lambda: None


def main() -> None:
    """Train. Up to 0.17 `pretrain` reads the command line itself; later it takes what was read from it."""
    _take_the_wheels_helpers()
    try:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args
    except ImportError:
        pretrain(provide_datasets, provide_model, ModelType.encoder_or_decoder, step_forward, args_defaults=DEFAULTS)
        return
    container = pretrain_cfg_container_from_args(parse_and_validate_args(args_defaults=DEFAULTS))
    # By name: 0.19 has another order.
    pretrain(
        container,
        train_valid_test_dataset_provider=provide_datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=step_forward,
        model_provider=provide_model,
    )


if __name__ == "__main__":
    main()
