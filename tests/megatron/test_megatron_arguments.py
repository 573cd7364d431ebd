"""Megatron's command line with the patch: values and options accepted, taken over, or refused with a reason."""

from __future__ import annotations

import importlib
import types

import pytest
import stub_megatron
from stub_megatron import RELEASES

import megatron_patch
from megatron_patch import PatchError
from megatron_patch.arguments import parse_keep
from te_ce import LossOptions

FUSION = ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"]
WITH_PARSER = [release for release in RELEASES.values() if release.implementation_field]
NEWEST = RELEASES["0.19.2"]
OPTIONS = {
    "label_smoothing": 0.1,
    "smoothing": "others",
    "z_loss_weight": 1e-4,
    "softcap": 30.0,
    "scale": 0.5,
    "vocab_size": 50257,
    "ignore_index": -1,
    "check_targets": True,
    "reproducible_tp": True,
}


@pytest.fixture
def training(tmp_path):
    """A function that makes a release with `megatron.training` this process's; returns its arguments module."""
    with pytest.MonkeyPatch.context() as patch:
        contexts = []

        def enter(release):
            contexts.append(stub_megatron.installed(release, tmp_path, patch, training=True))
            contexts[-1].__enter__()
            importlib.import_module("megatron.training.initialize")
            return importlib.import_module("megatron.training.arguments")

        yield enter
        for context in contexts:
            context.__exit__(None, None, None)


def words(**options):
    """As typed: --te-ce-*."""
    given = []
    for name, value in options.items():
        given.append(f"--te-ce-{name.replace('_', '-')}")
        given += [] if value is True else [str(value)]
    return given


def validated(training, *given):
    args = training.parse_args([*FUSION, *given])
    training.validate_args(args)
    return args


@pytest.mark.parametrize("release", WITH_PARSER, ids=lambda release: release.version)
@pytest.mark.parametrize("value", ["te_ce", "te_ce_linear", "native"])
def test_values(training, release, value):
    module = training(release)
    megatron_patch.apply(strict=True)
    assert validated(module, value).cross_entropy_fusion_impl == value


@pytest.mark.parametrize("release", WITH_PARSER, ids=lambda release: release.version)
def test_reverted_values_are_unknown(training, release, capsys):
    module = training(release)
    before = dict(vars(module))
    with megatron_patch.patched():
        held = module.add_megatron_arguments
        assert held is not before["add_megatron_arguments"]
    assert dict(vars(module)) == before
    module.add_megatron_arguments = held  # somebody still holds it
    for given in (["te_ce"], ["native", "--te-ce-softcap", "30"]):
        with pytest.raises(SystemExit):
            module.parse_args([*FUSION, *given])
        assert "te_ce" in capsys.readouterr().err or given[0] == "native"


def test_arguments_parsed_before_revert_are_as_megatron_wants_them(training):
    module = training(NEWEST)
    with megatron_patch.patched():
        args = module.parse_args([*FUSION, "native"])
    assert module.validate_args(args) is args


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_the_loss(training, name):
    module = training(NEWEST)
    megatron_patch.apply()
    args = validated(module, "te_ce", *words(**{name: OPTIONS[name]}))
    assert getattr(args, f"te_ce_{name}") == OPTIONS[name]  # in Megatron's dump of its arguments
    assert megatron_patch.status().options == LossOptions(**{name: OPTIONS[name]})


def test_every_field_has_its_option():
    assert {*OPTIONS, "reduction"} == set(LossOptions.__dataclass_fields__)


def test_options_reach_a_model_that_is_built(training, monkeypatch):
    from megatron_patch import wiring

    module, seen = training(NEWEST), []
    monkeypatch.setattr(wiring, "language_model_loss", lambda model, labels, logits, options: seen.append(options))
    megatron_patch.apply()
    model = stub_megatron.make_model(NEWEST, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te_ce")
    validated(module, "te_ce", *words(label_smoothing=0.1))
    model.compute_language_model_loss(None, None)
    assert seen == [LossOptions(label_smoothing=0.1)]


def test_together_with_those_of_apply(training):
    module = training(NEWEST)
    megatron_patch.apply(options=LossOptions(label_smoothing=0.1, softcap=30.0))
    validated(module, "te_ce", *words(label_smoothing=0.1, z_loss_weight=0.5))
    validated(module, "te_ce", *words(label_smoothing=0.1, z_loss_weight=0.5))  # a second time changes nothing
    assert megatron_patch.status().options == LossOptions(label_smoothing=0.1, softcap=30.0, z_loss_weight=0.5)
    with pytest.raises(ValueError, match=r"--te-ce-softcap: 20.0 is given, but apply\(\) was given 30.0"):
        validated(module, "te_ce", *words(softcap=20.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["native", *words(softcap=30)], "--te-ce-softcap: has no effect without .* te_ce or te_ce_linear"),
        (["te", *words(label_smoothing=0.1)], "--te-ce-label-smoothing: has no effect"),
        (["te_ce", *words(keep=0.5)], "--te-ce-keep: has no effect without .* te_ce_linear"),
        (["te_ce", *words(strict=True)], "--te-ce-strict: has no effect without .* te_ce_linear"),
        (["te_ce", *words(label_smoothing=1.5)], r"label_smoothing: expected a number in \[0, 1\)"),
        (["te_ce", *words(vocab_size=1000)], "--te-ce-vocab-size: expected at most the padded vocabulary of 512"),
    ],
)
def test_refused(training, given, message):
    module = training(NEWEST)
    megatron_patch.apply()
    args = module.parse_args([*FUSION, *given])
    args.padded_vocab_size = 512
    if given[0] == "te":
        args.cross_entropy_loss_fusion = False  # Megatron's own refusal apart
    with pytest.raises(ValueError, match=message):
        module.validate_args(args)


def test_a_dead_value_is_an_error_at_once(training):
    module = training(NEWEST)
    megatron_patch.apply()
    with pytest.raises(ValueError, match="has no effect while cross_entropy_loss_fusion is off"):
        module.validate_args(module.parse_args(["--cross-entropy-fusion-impl", "te_ce"]))


def test_options_of_a_loss_that_replaces_megatrons(training):
    module = training(NEWEST)
    megatron_patch.apply(replace_native=True)
    args = module.parse_args(words(label_smoothing=0.1))
    module.validate_args(args)
    assert megatron_patch.status().options.label_smoothing == 0.1


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("recompute", "recompute"),
        ("0.25", 0.25),
        ("1.0", 1.0),
        ("2GiB", 2 << 30),
        ("1.5MiB", 3 << 19),
        ("2097152", 2 << 20),
    ],
)
def test_keep(training, text, keep):
    module = training(NEWEST)
    megatron_patch.apply()
    validated(module, "te_ce_linear", "--te-ce-keep", text, "--te-ce-strict")
    assert megatron_patch.status().keep == keep
    assert f"keep={keep}" in megatron_patch.status().selects["te_ce_linear"]


@pytest.mark.parametrize("text", ["all", "1.5", "2", "-1", "3KiB", ""])
def test_no_keep(text):
    with pytest.raises(ValueError, match=r"keep: expected|could not convert"):
        parse_keep(text)


def test_keep_needs_the_fused_loss(training):
    training(NEWEST)
    megatron_patch.apply(keep=0.5)
    fields = {"cross_entropy_loss_fusion": True}
    stub_megatron.make_model(NEWEST, **fields, cross_entropy_fusion_impl="te_ce_linear")
    with pytest.raises(ValueError, match='keep: expected "recompute" for cross_entropy_fusion_impl="te_ce"'):
        stub_megatron.make_model(NEWEST, **fields, cross_entropy_fusion_impl="te_ce")
    with pytest.raises(PatchError, match=r"already applied with .*keep=0.5.*now asked for .*keep='recompute'"):
        megatron_patch.apply()


def test_yaml(training):
    """The file takes the place of the arguments: Megatron's fields in sections, te_ce's at the top."""
    training(NEWEST)
    yaml_arguments = importlib.import_module("megatron.training.yaml_arguments")
    megatron_patch.apply()
    fields = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te_ce_linear"}
    args = types.SimpleNamespace(
        model_parallel=types.SimpleNamespace(**fields), language_model=None, te_ce_softcap=30.0, te_ce_keep="1MiB"
    )
    assert yaml_arguments.validate_yaml(args) is args
    assert megatron_patch.status().options == LossOptions(softcap=30.0)
    assert megatron_patch.status().keep == 1 << 20
    args.model_parallel.cross_entropy_loss_fusion = False
    with pytest.raises(ValueError, match="has no effect while cross_entropy_loss_fusion is off"):
        yaml_arguments.validate_yaml(args)


@pytest.mark.parametrize("value", ["te_ce", "te_ce_linear"])
def test_deterministic_mode(training, value, caplog):
    """Megatron's are not deterministic; te_ce's are, and served in spite of the check, which the log says."""
    module = training(NEWEST)
    with pytest.raises(AssertionError, match="not deterministic"):
        validated(module, "native", "--deterministic-mode")
    megatron_patch.apply(strict=True)
    args = validated(module, value, "--deterministic-mode")
    assert (args.cross_entropy_loss_fusion, args.cross_entropy_fusion_impl) == (True, value)
    (line,) = [record.getMessage() for record in caplog.records if "validate_args is shown" in record.getMessage()]
    assert line.endswith("shown cross_entropy_loss_fusion=False in its place, so that its check does not refuse it")
    with pytest.raises(AssertionError, match="not deterministic"):
        validated(module, "native", "--deterministic-mode")


def test_a_parser_without_the_flag(training, tmp_path):
    module = training(NEWEST)
    text = (tmp_path / "megatron" / "training" / "arguments.py").read_text()
    (tmp_path / "megatron" / "training" / "arguments.py").write_text(text.replace("--cross-entropy-fusion-impl", "--x"))
    importlib.reload(module)
    megatron_patch.apply()
    with pytest.raises(PatchError, match=r"--cross-entropy-fusion-impl: .*not found; this is megatron-core 0\.19\.2"):
        module.parse_args([])
