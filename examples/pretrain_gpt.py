"""Pretrains a Megatron GPT whose vocabulary is sharded over tensor-parallel ranks, with te_ce as its loss.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py                      # CPU or GPUs, whatever is there
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --compare native     # against Megatron's own loss
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --data my_texts/ train.steps=1000

All that te_ce needs of a Megatron training script is between the two ruled lines below.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt.config import Config

CHECKOUT = Path(__file__).resolve().parents[1]

# ---------------------------------------------------------------------------------------------------------------
# 1. Two fields of Megatron's TransformerConfig choose the loss: te_ce's, or one of Megatron's own.
LOSS_FIELDS: dict[str, dict[str, Any]] = {
    "te_ce": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te_ce"},
    "te_ce_linear": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te_ce_linear"},
    "fused": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"},
    "unfused": {"cross_entropy_loss_fusion": False},
    "native": {"cross_entropy_loss_fusion": False},  # Megatron's default
}


def switch_on(options: dict[str, Any]) -> None:
    # 2. One call before the model is built makes Megatron understand "te_ce"; nothing else changes.
    import megatron_patch
    import te_ce

    megatron_patch.apply(options=te_ce.LossOptions(**options))


def is_it_on() -> str:
    # 3. Not needed: how many losses of this process were te_ce's.
    import megatron_patch

    return str(megatron_patch.status())


# ---------------------------------------------------------------------------------------------------------------


HARMLESS_WARNINGS = (
    ".*Apex.*not installed",  # the model is made of plain torch parts
    "absl.logging is not installed",
    "MimoModelConfig is experimental",
    "full scope is deprecated",  # said of a default that is not used
    r"barrier\(\): using the device under current context",  # each rank has set its GPU
)


def main(argv: list[str]) -> int:
    from gpt.config import ConfigError

    try:
        return pretrain(argv)
    except ConfigError as error:
        # Every rank finds the same mistake, and rank 0 tells it. The others wait for torchrun to end them; one that
        # is still there after a while is alone with its mistake.
        if os.environ.get("RANK", "0") != "0":
            time.sleep(10)
        print(f"pretrain_gpt.py: error: {error}", file=sys.stderr, flush=True)
        return 2


def pretrain(argv: list[str]) -> int:
    """One run, or three where losses are compared; returns the exit code."""
    from gpt.config import OURS, command_line

    config, compare = command_line(argv, CHECKOUT / "configs")
    tp = _checked(config)

    import torch
    from gpt import data, device, model, report
    from gpt.train import History, train
    from megatron.core import parallel_state

    ranks = device.start(config)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    loss = config.loss.implementation
    if loss in OURS:
        switch_on(config.loss.options)
    recorder = report.Recorder(Path(config.output.dir), ranks.is_first)
    text = data.load(config, ranks, recorder.say)
    vocab = data.padded_vocab_size(text.vocab_size, config.model.make_vocab_size_divisible_by, tp)
    recorder.say(report.heading(config, ranks, tp, text.vocab_size, vocab))

    def run(name: str, loss: str) -> History:
        gpt = model.build(config, tp, vocab, LOSS_FIELDS[loss], ranks.device)
        return train(name, config, gpt, text, ranks, recorder)

    runs = [run(loss, loss)]
    if loss in OURS:
        recorder.say(is_it_on())
    if compare:
        runs += [run(compare, compare), run(f"{compare} again", compare)]
    code = report.conclude(config, runs, text.unigram_entropy, recorder) if ranks.is_first else 0
    recorder.close()
    torch.distributed.destroy_process_group()
    return code


def _checked(config: Config) -> int:
    """The tensor-parallel size, once everything that can be judged without work is found right."""
    from gpt import device
    from gpt.config import OURS, ConfigError, tensor_parallel_size

    if "LOCAL_RANK" not in os.environ:
        raise ConfigError("expected a start by torchrun --nproc-per-node N examples/pretrain_gpt.py ..., found none")
    tp = tensor_parallel_size(config, int(os.environ["WORLD_SIZE"]))
    device.check(config)
    if config.loss.implementation in OURS:
        import te_ce

        try:
            te_ce.LossOptions(**config.loss.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"loss.options: {error}") from None
    elif config.loss.options:
        raise ConfigError(f"loss.options: only te_ce takes options, found {config.loss.options}; remove them")
    return tp


def _environment() -> None:
    """What Megatron recommends for tensor parallelism; and no warning that says nothing about this model."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for harmless in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=harmless)
    # From 0.18 on it recommends another model class, at every start.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


if __name__ == "__main__":
    _environment()
    sys.exit(main(sys.argv[1:]))
