"""A mistake is told in one line that names the key, what was expected and what was found."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from gpt import config as c

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CPU = CONFIGS / "gpt_cpu.yaml"


@pytest.mark.parametrize("name", ["gpt_cpu.yaml", "gpt_gpu.yaml"])
def test_shipped_files_give_and_document_every_key(name: str) -> None:
    text = (CONFIGS / name).read_text()
    document = yaml.safe_load(text)
    expected = {
        section.name: {key.name for key in dataclasses.fields(section.default_factory)}
        for section in dataclasses.fields(c.Config)
    }
    assert {section: set(values) for section, values in document.items()} == expected
    undocumented = [line for line in text.splitlines() if re.match(r"  \w+:", line) and "#" not in line]
    assert undocumented == []


def test_shipped_cpu_file_asks_for_one_nat() -> None:
    assert c.load(CPU, []).check.below_unigram == 1.0


def test_overrides_come_after_the_file() -> None:
    config = c.load(
        CPU,
        [
            "train.steps=50",
            "optimizer.lr=3e-4",
            "optimizer.min_lr=0",
            "check.below_unigram=null",
            "loss.options.label_smoothing=0.1",
        ],
    )
    assert config.train.steps == 50
    assert config.optimizer.lr == 3e-4
    assert config.optimizer.min_lr == 0.0
    assert config.check.below_unigram is None
    assert config.loss.options == {"label_smoothing": 0.1}
    assert config.model.num_layers == yaml.safe_load(CPU.read_text())["model"]["num_layers"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", r"command line: unknown key 'train.stepz'; did you mean 'train.steps'\?"),
        ("trian.steps=3", r"command line: unknown section 'trian'; did you mean 'train'\?"),
        ("zzz.steps=3", r"unknown section 'zzz'; expected one of data, parallel"),
        ("train.steps", r"expected section.key=value, found 'train.steps'"),
        ("train.steps=many", r"train.steps: expected int, found 'many'"),
        ("train.steps=1.5", r"train.steps: expected int, found 1.5"),
        ("train.steps=true", r"train.steps: expected int, found True"),
        ("train.steps=null", r"train.steps: expected int, found None"),
        ("train.steps=0", r"train.steps: expected more than 0, found 0"),
        ("train.steps=[1", r"expected a YAML value after '='"),
        ("train.steps.more=1", r"'train.steps' holds one value; 'train.steps.more' names a part of it"),
        ("optimizer.lr=fast", r"optimizer.lr: expected float, found 'fast'"),
        ("optimizer.min_lr=1.0", r"optimizer.min_lr: expected 0 up to optimizer.lr"),
        ("optimizer.warmup_steps=-1", r"optimizer.warmup_steps: expected 0 or more, found -1"),
        ("model.dtype=float8", r"model.dtype: expected one of float32, bfloat16, found 'float8'"),
        ("loss.implementation=liger", r"expected one of te_ce, te_ce_linear, native, fused, unfused, found 'liger'"),
        ("data.held_out=1.5", r"data.held_out: expected a share between 0 and 1, found 1.5"),
        ("data.vocab_size=100", r"data.vocab_size: expected 256 bytes"),
        ("data.path=/no/such", r"data.path: expected a text file or a folder, found nothing at /no/such"),
        ("data.prefix=/no/such", r"data.prefix and data.tokenizer: expected both or neither"),
    ],
)
def test_one_line_for_a_wrong_value(override: str, message: str) -> None:
    with pytest.raises(c.ConfigError, match=message) as raised:
        c.load(CPU, [override])
    assert "\n" not in str(raised.value)


def test_one_line_for_a_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(c.ConfigError, match=r"expected a YAML file, found nothing at"):
        c.load(tmp_path / "none.yaml", [])
    broken = tmp_path / "broken.yaml"
    for text, message in (
        ("train: [", "not valid YAML"),
        ("- 1", "expected sections with keys, found list"),
        ("train: 3", "expected keys under 'train', found 3"),
        ("train: {stepz: 3}", "broken.yaml: unknown key 'train.stepz'"),
    ):
        broken.write_text(text)
        with pytest.raises(c.ConfigError, match=message) as raised:
            c.load(broken, [])
        assert "\n" not in str(raised.value)


def test_preprocessed_data_needs_all_its_files(tmp_path: Path) -> None:
    prefix, tokenizer = tmp_path / "text", tmp_path / "tokenizer.json"
    overrides = [f"data.prefix={prefix}", f"data.tokenizer={tokenizer}"]
    for file, missing in (
        (Path(f"{prefix}.bin"), r"the file .*text\.bin"),
        (Path(f"{prefix}.idx"), r"the file .*text\.idx"),
        (tokenizer, r"tokenizer\.json, found nothing"),
    ):
        with pytest.raises(c.ConfigError, match=missing):
            c.load(CPU, overrides)
        file.touch()
    c.load(CPU, overrides)
    with pytest.raises(c.ConfigError, match=r"one of the two, found both"):
        c.load(CPU, [*overrides, f"data.path={tmp_path}"])


@pytest.mark.parametrize(
    ("overrides", "world", "message"),
    [
        (["parallel.tensor_model_parallel_size=2"], 3, r"expected a divisor of the 3 ranks, found 2"),
        (["parallel.tensor_model_parallel_size=-1"], 2, r"expected more than 0, found -1"),
        (["parallel.ranks_per_gpu=0"], 2, r"parallel.ranks_per_gpu: expected more than 0, found 0"),
        ([], 3, r"model.num_attention_heads: expected a multiple of the tensor-parallel size 3, found 4"),
        (["model.ffn_hidden_size=511"], 2, r"model.ffn_hidden_size: expected a multiple of .* 2, found 511"),
        (["model.hidden_size=130"], 2, r"model.hidden_size: expected an even number for each of 4 heads, found 130"),
        (["train.global_batch_size=12"], 2, r"train.global_batch_size: expected a multiple of .* = 8, found 12"),
        (["parallel.tensor_model_parallel_size=1"], 2, r"train.global_batch_size: expected a multiple of .* = 16"),
    ],
)
def test_what_does_not_divide(overrides: list[str], world: int, message: str) -> None:
    with pytest.raises(c.ConfigError, match=message):
        c.tensor_parallel_size(c.load(CPU, overrides), world)


def test_all_ranks_are_tensor_parallel_by_default() -> None:
    assert [c.tensor_parallel_size(c.load(CPU, []), world) for world in (1, 2, 4)] == [1, 2, 4]


def test_command_line() -> None:
    config, compare = c.command_line(
        ["train.steps=7", "--data", str(CONFIGS), "--compare", "fused", "train.seed=3"], CONFIGS
    )
    assert (config.train.steps, config.train.seed, config.data.path, compare) == (7, 3, str(CONFIGS), "fused")
    for arguments, message in (
        (["--compare", "liger"], r"invalid choice: 'liger'"),
        (["--nonsense"], r"unrecognized arguments: --nonsense"),
        (
            ["--compare", "native", "loss.implementation=fused"],
            r"expected loss.implementation te_ce or te_ce_linear, found fused",
        ),
    ):
        with pytest.raises(c.ConfigError, match=message) as raised:
            c.command_line(arguments, CONFIGS)
        assert "\n" not in str(raised.value)
