"""replace_te: a configuration that asks for Transformer Engine's loss is served, in every release, installed or not."""

from __future__ import annotations

import importlib
import inspect
import logging
import types

import pytest
import stub_megatron
import torch
import torch.nn.functional as F
from stub_megatron import RELEASES, make_model, module

import megatron_patch
from megatron_patch import PatchError, transformer_engine, wiring
from te_ce import LossOptions
from te_ce.counters import served

ASKING = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
NEWEST = RELEASES["0.19.2"]
WITH_WRAPPER = [release for release in RELEASES.values() if release.te_arguments]
THEIRS = -17.0  # what the stand-in for Transformer Engine returns


def names(releases):
    return [release.version for release in releases]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that makes a release the `megatron` of this process, until the test ends."""
    with pytest.MonkeyPatch.context() as patch:
        contexts = []

        def enter(release, **parts):
            contexts.append(stub_megatron.installed(release, tmp_path, patch, **parts))
            contexts[-1].__enter__()

        yield enter
        for context in contexts:
            context.__exit__(None, None, None)


def inputs(v=7):
    torch.manual_seed(0)
    labels = torch.randint(0, v, (2, 5))
    labels[1, 2] = -100
    return labels, torch.randn(5, 2, v, requires_grad=True)


def dense(labels, logits):
    x = logits.double().transpose(0, 1).flatten(0, 1)
    return F.cross_entropy(x, labels.flatten(), reduction="none").view(2, 5)


def check_served(call, expected):
    before = sum(served().values())
    loss = call()
    assert sum(served().values()) == before + 1
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("te", [False, True], ids=["no te", "te"])
@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_served(install, release, te):
    install(release, te=te)
    megatron_patch.apply(replace_te=True, strict=True)
    status = megatron_patch.status()
    assert status.intact
    assert status.replace_te
    assert "replace_te=True" in str(status)
    labels, logits = inputs()
    model = make_model(release, **ASKING)
    assert model.config.cross_entropy_fusion_impl == "te"
    check_served(lambda: model.compute_language_model_loss(labels, logits), dense(labels, logits))


@pytest.mark.parametrize("release", WITH_WRAPPER[:-1], ids=names(WITH_WRAPPER[:-1]))
def test_untouched_without_the_flag(install, release):
    install(release, te=True)
    held = dict(vars(module("models.common.language_module.language_module")))
    for replace_native in (False, True):
        megatron_patch.apply(replace_native=replace_native)
        assert (
            module("models.common.language_module.language_module").te_parallel_cross_entropy
            is held["te_parallel_cross_entropy"]
        )
        before = sum(served().values())
        assert (make_model(release, **ASKING).compute_language_model_loss(*inputs()) == THEIRS).all()
        assert sum(served().values()) == before
        megatron_patch.revert()


def test_objections_stay_without_the_flag(install):
    install(NEWEST, training=True)
    megatron_patch.apply(replace_native=True)
    with pytest.warns(UserWarning, match="stability"):
        model = make_model(NEWEST, **ASKING)
    with pytest.raises(RuntimeError, match="Transformer Engine is missing"):
        model.compute_language_model_loss(*inputs())
    with pytest.raises(AssertionError, match="te is disabled"):
        importlib.import_module("megatron.training.arguments").validate_args(arguments())


@pytest.mark.parametrize("te", [False, True], ids=["no te", "te"])
@pytest.mark.parametrize("release", WITH_WRAPPER, ids=names(WITH_WRAPPER))
def test_the_wrapper_itself(install, release, te):
    """As the release calls it, and by keyword; its other aliases; another release's callers do not matter."""
    install(release, te=te)
    language_module = module("models.common.language_module.language_module")
    alias = types.ModuleType("someone")
    alias.loss = language_module.te_parallel_cross_entropy
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.import_module("sys").modules, "someone", alias)
        megatron_patch.apply(replace_te=True)
        labels, logits = inputs()
        expected = dense(labels, logits).t()
        calls = [language_module.te_parallel_cross_entropy]
        if te:
            calls += [module("extensions.transformer_engine").te_parallel_cross_entropy, alias.loss]
            wanted = ["logits", "labels", *(part.split("=")[0] for part in release.te_arguments.split(", "))]
            assert list(inspect.signature(calls[0]).parameters) == wanted
        else:
            assert alias.loss is None  # not every None of the process
        for call in calls:
            check_served(lambda call=call: call(logits, labels.t(), None), expected)
            check_served(lambda call=call: call(logits=logits, labels=labels.t(), tp_group=None), expected)
            check_served(lambda call=call: call(logits, labels.t(), None, True), expected)
        megatron_patch.revert()
        if te:
            assert (calls[0](logits, labels.t(), None) == THEIRS).all()  # held by somebody: Megatron's again
            assert alias.loss is language_module.te_parallel_cross_entropy
        else:
            assert language_module.te_parallel_cross_entropy is None
            with pytest.raises(RuntimeError, match="te_ce was reverted, and Transformer Engine is not installed"):
                calls[0](logits, labels.t(), None)


def test_group_and_options(install, monkeypatch):
    seen = []

    def record(logits, target, *, group, options, inplace):
        seen.append((group, options, inplace))
        return logits.sum(-1).float()

    install(NEWEST, te=True)
    for caller in (wiring, transformer_engine):
        monkeypatch.setattr(caller, "vocab_parallel_cross_entropy", record)
    options = LossOptions(label_smoothing=0.1)
    megatron_patch.apply(replace_te=True, options=options)
    group = types.SimpleNamespace(size=lambda: 2)
    labels, logits = inputs()
    make_model(NEWEST, group, **ASKING).compute_language_model_loss(labels, logits)
    module("extensions.transformer_engine").te_parallel_cross_entropy(logits, labels.t(), group)
    assert seen == [(group, options, "auto")] * 2


def arguments(**fields):
    values = {"micro_batch_size": 1, "deterministic_mode": False} | ASKING | fields
    return types.SimpleNamespace(**values)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_the_check_is_lifted(install, release, deterministic, caplog):
    install(release, training=True)
    importlib.import_module("megatron.training.initialize")
    megatron_patch.apply(replace_te=True, strict=True)
    args = arguments(deterministic_mode=deterministic)
    before = dict(vars(args))
    with caplog.at_level(logging.WARNING, "megatron_patch"):
        for name in ("initialize", "arguments"):
            check = importlib.import_module(f"megatron.training.{name}").validate_args
            assert check(args, {"a": 1}) is args
            assert check(args=args, defaults={}) is args
    assert args.validated == {}
    del args.validated
    assert vars(args) == before
    (line,) = [record.getMessage() for record in caplog.records if "validate_args is shown" in record.getMessage()]
    assert 'cross_entropy_fusion_impl="te" is served by te_ce' in line


def test_other_refusals_stay(install):
    install(NEWEST, training=True)
    megatron_patch.apply(replace_te=True)
    check = importlib.import_module("megatron.training.arguments").validate_args
    args = arguments(micro_batch_size=0)
    with pytest.raises(AssertionError, match="micro_batch_size"):
        check(args)
    assert args.cross_entropy_fusion_impl == "te"
    with pytest.raises(AssertionError, match="not deterministic"):
        check(arguments(deterministic_mode=True, cross_entropy_fusion_impl="native"))
    megatron_patch.revert()
    with pytest.raises(AssertionError, match="te is disabled"):
        check(arguments())  # held by somebody: Megatron's again


def test_a_check_that_changed_is_an_error(install, tmp_path):
    install(NEWEST, training=True)
    (tmp_path / "megatron" / "training" / "arguments.py").write_text(
        "def add_megatron_arguments(parser): pass\ndef validate_args(other): pass"
    )
    with pytest.raises(PatchError, match=r"validate_args: expected parameters \(args, defaults\), found \(other\)"):
        megatron_patch.apply(replace_te=True)
    assert not megatron_patch.status().applied


def test_training_that_does_not_import_is_left_alone(install, tmp_path):
    install(NEWEST, training=True)
    (tmp_path / "megatron" / "training" / "arguments.py").write_text("raise TypeError('made for another Python')")
    megatron_patch.apply(replace_te=True, strict=True)
    assert {binding.role for binding in megatron_patch.status().bindings} == {"loss", "config", "call", "layer", "te"}


@pytest.mark.parametrize("te", [False, True], ids=["no te", "te"])
@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_revert_restores_by_identity(install, release, te):
    install(release, te=te, training=True)
    initialize = importlib.import_module("megatron.training.initialize")
    check = importlib.import_module("megatron.training.arguments").validate_args
    language_module = module("models.common.language_module.language_module")
    config = module("model_parallel_config").ModelParallelConfig
    held = dict(vars(language_module)), config.__dict__["__post_init__"]
    with megatron_patch.patched(replace_te=True, strict=True):
        assert initialize.validate_args is not check
        late = types.ModuleType("late")
        late.check = initialize.validate_args
        importlib.import_module("sys").modules["late"] = late
    del importlib.import_module("sys").modules["late"]
    assert late.check is initialize.validate_args is check
    assert (dict(vars(language_module)), config.__dict__["__post_init__"]) == held


def test_arguments_by_position(install):
    for function in (megatron_patch.apply, megatron_patch.patched):
        names = list(inspect.signature(function).parameters)
        assert names == ["replace_native", "replace_te", "options", "strict", "keep"]
    install(NEWEST)
    with megatron_patch.patched(False, True, LossOptions(label_smoothing=0.1), True):
        status = megatron_patch.status()
        assert (status.replace_native, status.replace_te, status.options.label_smoothing) == (False, True, 0.1)


def test_applied_with_other_arguments(install):
    install(NEWEST)
    megatron_patch.apply(replace_te=True)
    megatron_patch.apply(replace_te=True)
    with pytest.raises(PatchError, match=r"already applied with .*replace_te=True, .*now asked for .*replace_te=False"):
        megatron_patch.apply()
