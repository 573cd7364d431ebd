"""What a run is made of: a YAML file, `section.key=value` on the command line, and checks made before any work.

Every rank reads the same configuration and comes to the same verdict, so a mistake ends all of them without
a collective. Each key has its line of documentation in `configs/gpt_cpu.yaml`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

LossName = Literal["te_ce", "te_ce_linear", "native", "fused", "unfused"]

# Those that are not Megatron's own.
OURS = ("te_ce", "te_ce_linear")


class ConfigError(Exception):
    """A mistake of the caller, told in one line."""


@dataclass
class DataConfig:
    path: str | None = None
    vocab_size: int = 8192
    prefix: str | None = None
    tokenizer: str | None = None
    end_of_document: str = "<|endoftext|>"
    held_out: float = 0.05
    cache: str | None = None


@dataclass
class ParallelConfig:
    tensor_model_parallel_size: int | None = None
    ranks_per_gpu: int = 1


@dataclass
class ModelConfig:
    num_layers: int = 2
    hidden_size: int = 128
    ffn_hidden_size: int = 512
    num_attention_heads: int = 4
    seq_length: int = 128
    dtype: Literal["float32", "bfloat16"] = "float32"
    make_vocab_size_divisible_by: int = 128


@dataclass
class LossConfig:
    implementation: LossName = "te_ce"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainConfig:
    steps: int = 300
    global_batch_size: int = 8
    micro_batch_size: int = 8
    seed: int = 1234
    log_interval: int = 10
    eval_interval: int = 100
    eval_batches: int = 8


@dataclass
class OptimizerConfig:
    lr: float = 3e-3
    min_lr: float = 3e-4
    warmup_steps: int = 60
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    clip_grad: float = 0.0


@dataclass
class CheckConfig:
    below_unigram: float | None = None


@dataclass
class OutputConfig:
    dir: str = "out/gpt"


@dataclass
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    output: OutputConfig = field(default_factory=OutputConfig)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"command line: {message}; see --help")


def command_line(argv: list[str], folder: Path) -> tuple[Config, str | None]:
    """`(configuration, name of the loss to compare with or None)` of the arguments after the script's name.

    `folder` holds the default files, `gpt_gpu.yaml` and `gpt_cpu.yaml`. Raises ConfigError.
    """
    parser = _Parser(
        prog="torchrun --nproc-per-node N examples/pretrain_gpt.py",
        description="Pretrains a Megatron GPT on text, with te_ce as its loss. The keys of a configuration are "
        "documented in configs/gpt_cpu.yaml.",
    )
    parser.add_argument("--config", type=Path, help="default: configs/gpt_gpu.yaml with a GPU, else gpt_cpu.yaml")
    parser.add_argument("--data", metavar="FILE_OR_FOLDER", help="text to train on; short for data.path=...")
    parser.add_argument(
        "--compare",
        choices=["native", "unfused", "fused"],
        help="train again, twice, with Megatron's own loss and overlay the curves; native is Megatron's default, "
        "which is the unfused one",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="e.g. train.steps=50 check.below_unigram=null"
    )
    args = parser.parse_intermixed_args(argv)
    overrides = list(args.overrides)
    if args.data is not None:
        overrides.append(f"data.path={json.dumps(args.data)}")  # a YAML string, whatever the name looks like
    config = load(args.config or folder / default_name(), overrides)
    if args.compare and config.loss.implementation not in OURS:
        raise ConfigError(
            f"--compare {args.compare}: expected loss.implementation te_ce or te_ce_linear, "
            f"found {config.loss.implementation}; remove one of the two"
        )
    return config, args.compare


def default_name() -> str:
    import torch

    return "gpt_gpu.yaml" if torch.cuda.is_available() else "gpt_cpu.yaml"


def load(path: Path, overrides: list[str]) -> Config:
    """The file's values, then the overrides'; raises ConfigError for the first thing wrong."""
    if not path.is_file():
        raise ConfigError(f"--config: expected a YAML file, found nothing at {path}")
    config = Config()
    for section, values in _read_yaml(path.read_text(encoding="utf-8"), str(path)).items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected keys under '{section}', found {values!r}")
        for key, value in values.items():
            _assign(config, f"{section}.{key}", value, str(path))
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"command line: expected section.key=value, found '{override}'")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"command line: expected a YAML value after '=', found '{override}'") from None
        _assign(config, name, value, "command line")
    _check_values(config)
    return config


def _read_yaml(text: str, origin: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{origin}: expected sections with keys, found {type(document).__name__}")
    return document


def _assign(config: Config, name: str, value: Any, origin: str) -> None:
    """Sets `section.key`, or `section.key.entry` where the key holds a mapping."""
    section_name, _, key = name.partition(".")
    key, _, entry = key.partition(".")
    section = getattr(config, section_name, None) if section_name in _names(config) else None
    if section is None:
        raise ConfigError(f"{origin}: unknown section '{section_name}'{_nearest(section_name, _names(config))}")
    if key not in _names(section):
        raise ConfigError(
            f"{origin}: unknown key '{section_name}.{key}'{_nearest(key, _names(section), f'{section_name}.')}"
        )
    if entry:
        if not isinstance(getattr(section, key), dict):
            raise ConfigError(f"{origin}: '{section_name}.{key}' holds one value; '{name}' names a part of it")
        value = {**getattr(section, key), entry: value}
    hint = typing.get_type_hints(type(section))[key]
    setattr(section, key, _typed(hint, value, f"{origin}: {section_name}.{key}"))


def _names(section: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(section)]


def _nearest(name: str, names: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{prefix}{close[0]}'?" if close else f"; expected one of {', '.join(names)}"


def _typed(hint: Any, value: Any, where: str) -> Any:
    """`value` as `hint` asks, or ConfigError. YAML reads `3e-4` as text, so text that is a number is one."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = next(k for k in kinds if k is not type(None))
    if typing.get_origin(kind) is Literal:
        if value in typing.get_args(kind):
            return value
        raise ConfigError(f"{where}: expected one of {', '.join(typing.get_args(kind))}, found {value!r}")
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    kind = typing.get_origin(kind) or kind
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{where}: expected {kind.__name__}, found {value!r}")


def _check_values(config: Config) -> None:
    """What can be judged without knowing the number of ranks."""
    may_be_zero = {"seed"}
    for name, section in (("model", config.model), ("train", config.train), ("parallel", config.parallel)):
        for key, value in vars(section).items():
            if isinstance(value, int) and value <= 0 and key not in may_be_zero:
                raise ConfigError(f"{name}.{key}: expected more than 0, found {value}")
    settings = config.optimizer
    if settings.lr <= 0.0:
        raise ConfigError(f"optimizer.lr: expected more than 0, found {settings.lr}")
    if not 0.0 <= settings.min_lr <= settings.lr:
        raise ConfigError(f"optimizer.min_lr: expected 0 up to optimizer.lr = {settings.lr}, found {settings.min_lr}")
    for key in ("weight_decay", "clip_grad", "warmup_steps"):
        if getattr(settings, key) < 0.0:
            raise ConfigError(f"optimizer.{key}: expected 0 or more, found {getattr(settings, key)}")
    entries = config.data.vocab_size
    if entries < 257:
        raise ConfigError(f"data.vocab_size: expected 256 bytes and the end of document at least, found {entries}")
    if not 0.0 < config.data.held_out < 1.0:
        raise ConfigError(f"data.held_out: expected a share between 0 and 1, found {config.data.held_out}")
    _check_paths(config.data)


def _check_paths(data: DataConfig) -> None:
    if data.path is not None and not Path(data.path).exists():
        raise ConfigError(f"data.path: expected a text file or a folder, found nothing at {data.path}")
    if (data.prefix is None) != (data.tokenizer is None):
        raise ConfigError("data.prefix and data.tokenizer: expected both or neither, found one; set the other")
    if data.prefix is None:
        return
    if data.path is not None:
        raise ConfigError("data.path and data.prefix: expected one of the two, found both; remove one")
    for suffix in (".bin", ".idx"):
        if not Path(data.prefix + suffix).is_file():
            raise ConfigError(f"data.prefix: expected the file {data.prefix}{suffix}, found nothing there")
    if not Path(str(data.tokenizer)).is_file():
        raise ConfigError(f"data.tokenizer: expected a tokenizer.json, found nothing at {data.tokenizer}")


def tensor_parallel_size(config: Config, world_size: int) -> int:
    """The tensor-parallel size over `world_size` ranks; ConfigError if the model or batch does not divide by it."""
    tp = config.parallel.tensor_model_parallel_size or world_size
    name = "parallel.tensor_model_parallel_size"
    if tp < 1 or world_size % tp:
        raise ConfigError(f"{name}: expected a divisor of the {world_size} ranks, found {tp}")
    for key in ("num_attention_heads", "ffn_hidden_size"):
        value = getattr(config.model, key)
        if value % tp:
            raise ConfigError(f"model.{key}: expected a multiple of the tensor-parallel size {tp}, found {value}")
    heads, hidden = config.model.num_attention_heads, config.model.hidden_size
    if hidden % heads or hidden // heads % 2:
        raise ConfigError(f"model.hidden_size: expected an even number for each of {heads} heads, found {hidden}")
    per_pass = config.train.micro_batch_size * (world_size // tp)
    if config.train.global_batch_size % per_pass:
        raise ConfigError(
            f"train.global_batch_size: expected a multiple of micro_batch_size x data-parallel size = {per_pass}, "
            f"found {config.train.global_batch_size}"
        )
    return tp
