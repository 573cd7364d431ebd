"""apply, revert, patched, status: what they replace, refuse, report and put back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
from types import ModuleType

import megatron_gpt as gpt
import pytest
from megatron.core.fusions import fused_cross_entropy
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.common.language_module import language_module
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import cross_entropy

import megatron_patch
from megatron_patch import PatchError, releases
from te_ce import LossOptions
from te_ce.counters import served

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

METHOD = "compute_language_model_loss"


def method():
    return LanguageModule.__dict__[METHOD]


@pytest.fixture
def megatron():
    """Megatron's own objects, which must be back after the test."""
    holders = (LanguageModule, ModelParallelConfig, cross_entropy, fused_cross_entropy, language_module)
    before = [dict(vars(holder)) for holder in holders]
    yield
    megatron_patch.revert()
    for holder, attributes in zip(holders, before, strict=True):
        assert all(vars(holder)[name] is value for name, value in attributes.items() if not name.startswith("__"))


@pytest.mark.parametrize("replace_native", [False, True])
def test_twice_is_once(megatron, replace_native):
    original = method()
    megatron_patch.apply(replace_native=replace_native)
    first, before = method(), megatron_patch.status()
    megatron_patch.apply(replace_native=replace_native, options=LossOptions())  # the default, spelled out
    assert method() is first
    assert first.__wrapped__ is original
    assert megatron_patch.status() == before
    megatron_patch.revert()
    assert method() is original
    megatron_patch.revert()  # not applied: nothing to do
    assert method() is original


@pytest.mark.parametrize("other", [{"replace_native": True}, {"options": LossOptions(label_smoothing=0.1)}])
def test_twice_with_other_arguments(megatron, other):
    megatron_patch.apply()
    before = megatron_patch.status()
    with pytest.raises(PatchError, match=r"already applied with .*call revert\(\) first"):
        megatron_patch.apply(**other)
    assert megatron_patch.status() == before


def test_patched_inside_applied_leaves_it_applied(megatron):
    megatron_patch.apply()
    ours = method()
    with megatron_patch.patched():
        assert method() is ours
    assert method() is ours


def test_patched_reverts_after_an_exception(megatron):
    original = method()
    with pytest.raises(KeyError), megatron_patch.patched(replace_native=True):
        raise KeyError
    assert method() is original
    assert not megatron_patch.status().applied


SYMBOLS = [
    (LanguageModule, METHOD),
    (ModelParallelConfig, "__post_init__"),
    (cross_entropy, "_VocabParallelCrossEntropy"),
    (cross_entropy, "vocab_parallel_cross_entropy"),
    (fused_cross_entropy, "_VocabParallelCrossEntropy"),
    (fused_cross_entropy, "fused_vocab_parallel_cross_entropy"),
]


@pytest.mark.parametrize(("holder", "name"), SYMBOLS)
def test_missing_symbol(monkeypatch, holder, name):
    originals = {symbol: vars(symbol[0])[symbol[1]] for symbol in SYMBOLS}
    monkeypatch.delattr(holder, name)
    with pytest.raises(PatchError, match=f"{name}: expected in megatron-core, not found"):
        megatron_patch.apply(replace_native=True)
    assert not megatron_patch.status().applied
    del originals[holder, name]
    assert all(vars(h)[n] is value for (h, n), value in originals.items())


def test_missing_native_symbol_does_not_matter_to_the_flag(monkeypatch):
    monkeypatch.delattr(cross_entropy, "_VocabParallelCrossEntropy")
    megatron_patch.apply()
    assert megatron_patch.status().intact


def test_other_signature(monkeypatch):
    def compute_language_model_loss(self, logits, labels): ...

    compute_language_model_loss.__module__ = LanguageModule.__module__
    monkeypatch.setattr(LanguageModule, METHOD, compute_language_model_loss)
    with pytest.raises(PatchError, match=r"\(self, labels, logits\), found \(self, logits, labels\)"):
        megatron_patch.apply()


def test_missing_module(monkeypatch):
    monkeypatch.setitem(sys.modules, LanguageModule.__module__, None)
    with pytest.raises(PatchError, match="language_module: expected in megatron-core, import failed"):
        megatron_patch.apply()


def test_megatron_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(PatchError, match=r"needs megatron-core >= 0\.10: import megatron\.core failed"):
        megatron_patch.apply()


@pytest.mark.parametrize("version", ["0.9.0", "0.5.0rc0"])
def test_megatron_too_old(monkeypatch, version):
    monkeypatch.setattr("megatron.core.__version__", version)
    with pytest.raises(PatchError, match=f"found {version}; install a newer release"):
        megatron_patch.apply()


@pytest.mark.parametrize("version", ["0.20.0", "1.0.0", "unknown"])
def test_unknown_release(monkeypatch, caplog, version):
    monkeypatch.setattr("megatron.core.__version__", version)
    with pytest.raises(PatchError, match=f"megatron-core {version}: expected 0.10 to 0.19"):
        megatron_patch.apply(strict=True)
    assert not megatron_patch.status().applied
    megatron_patch.apply()
    assert megatron_patch.status().intact
    assert f"megatron-core {version}: expected" in caplog.text


def test_known_release_passes_strict(megatron):
    megatron_patch.apply(replace_native=True, strict=True)
    assert megatron_patch.status().intact


def test_overriding_model_class(caplog):
    class Overrides(LanguageModule):
        def compute_language_model_loss(self, labels, logits): ...

    try:
        with pytest.raises(PatchError, match="Overrides overrides compute_language_model_loss"):
            megatron_patch.apply(strict=True)
        megatron_patch.apply()
        assert "Overrides overrides" in caplog.text
    finally:  # a class lives on as a subclass until it is collected
        del Overrides.compute_language_model_loss


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (LossOptions(reduction="mean"), ValueError, 'options.reduction: expected "none"'),
        ({"label_smoothing": 0.1}, TypeError, "expected a te_ce.LossOptions or None, got dict"),
    ],
)
def test_options_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        megatron_patch.apply(options=options)
    assert not megatron_patch.status().applied


@pytest.fixture
def overwritten(monkeypatch):
    """The patch applied, and then the loss method wrapped by somebody else."""
    megatron_patch.apply()
    ours = method()

    @functools.wraps(ours)
    def theirs(self, labels, logits):
        return ours(self, labels, logits)

    theirs.__module__ = "another.party"
    monkeypatch.setattr(LanguageModule, METHOD, theirs)
    yield theirs
    monkeypatch.undo()
    LanguageModule.compute_language_model_loss = ours.__wrapped__


def test_overwritten_status(overwritten):
    status = megatron_patch.status()
    assert status.applied
    assert not status.intact
    (binding,) = [b for b in status.bindings if not b.ours]
    assert binding.attribute == METHOD
    assert "another.party" in binding.found
    assert "NOT OURS: another.party" in str(status)


def test_overwritten_apply(overwritten, caplog):
    megatron_patch.apply()
    assert "set by another party" in caplog.text
    with pytest.raises(PatchError, match=r"another\.party.*set by another party"):
        megatron_patch.apply(strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_overwritten_revert(overwritten, caplog, strict):
    if strict:
        with pytest.raises(PatchError, match="left as it is"):
            megatron_patch.revert(strict=True)
    else:
        megatron_patch.revert()
        assert "left as it is" in caplog.text
    assert method() is overwritten
    assert not megatron_patch.status().applied
    assert not hasattr(ModelParallelConfig.__dict__["__post_init__"], "__wrapped__")


@pytest.mark.usefixtures("world")
def test_what_others_still_hold_of_ours_behaves_as_megatron(overwritten):
    model, batch = gpt.make_model(), gpt.make_batch(2, 4)
    megatron_patch.revert()
    model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, "te_ce"
    count = sum(served().values())
    with contextlib.suppress(UnboundLocalError):  # Megatron's own method does not know the value, or does not read it
        gpt.forward(model, batch, batch.labels)
    assert sum(served().values()) == count


def test_somebody_elses_earlier_patch(monkeypatch, caplog):
    def theirs(self, labels, logits): ...

    monkeypatch.setattr(LanguageModule, METHOD, theirs)
    with pytest.raises(PatchError, match=r"expected Megatron's own, found .*theirs"):
        megatron_patch.apply(strict=True)
    megatron_patch.apply()
    assert "expected Megatron's own" in caplog.text
    megatron_patch.revert()
    assert method() is theirs


# The log, and status.


def test_logs_once_what_was_replaced(caplog):
    with caplog.at_level(logging.INFO, logger="megatron_patch"):
        megatron_patch.apply()
        megatron_patch.apply()
    (record,) = [r for r in caplog.records if r.name == "megatron_patch"]
    assert f"LanguageModule.{METHOD}" in record.getMessage()
    assert record.levelno >= logging.WARNING  # visible with logging as Python starts it


def test_other_ranks_do_not_log(caplog, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setenv("RANK", "1")
    megatron_patch.apply()
    assert not [r for r in caplog.records if r.name == "megatron_patch"]


def test_status_before_and_after():
    status = megatron_patch.status()
    assert not status.applied
    assert not status.bindings
    assert not status.intact
    assert str(status).startswith("megatron_patch: not applied")
    megatron_patch.apply(replace_native=True, options=LossOptions(label_smoothing=0.1))
    status = megatron_patch.status()
    assert status.intact
    assert status.replace_native
    assert status.options.label_smoothing == 0.1
    assert status.served == served()
    assert f"LanguageModule.{METHOD}: ours" in str(status)
    assert "losses served in this process" in str(status)
    with pytest.raises(dataclasses.FrozenInstanceError):
        status.applied = False


def test_status_counts_the_losses(world, asking):
    megatron_patch.apply()
    model, batch = asking(gpt.make_model()), gpt.make_batch(2, 4)
    before = megatron_patch.status().served["torch"]
    for _ in range(3):
        gpt.forward(model, batch, batch.labels)
    assert megatron_patch.status().served["torch"] == before + 3


def test_a_module_that_is_not_a_module(monkeypatch):
    """Some packages put objects of their own into sys.modules."""
    monkeypatch.setitem(sys.modules, "odd_entry", object())
    monkeypatch.setitem(sys.modules, "odd_module", ModuleType("odd_module"))
    megatron_patch.apply(replace_native=True)
    assert megatron_patch.status().intact


def test_supported_window_is_the_documented_one():
    assert (releases.FIRST, releases.LAST) == ((0, 10), (0, 19))
