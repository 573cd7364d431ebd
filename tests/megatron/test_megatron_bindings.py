"""Replacing and restoring attributes, on modules made for the purpose."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from megatron_patch import PatchError, bindings
from megatron_patch.bindings import Binding


class Functions:
    """Not module globals: `restore` puts the original back wherever a module holds the replacement, here too."""

    @staticmethod
    def original(): ...

    @staticmethod
    def ours(): ...

    @staticmethod
    def theirs(): ...


@pytest.fixture
def module(monkeypatch):
    def make(name, kind=ModuleType, **attributes):
        made = kind(name)
        made.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


def test_install_and_restore_by_identity(module):
    home, user = module("bindings_home", f=Functions.original), module("bindings_user", g=Functions.original)
    found = [(m, a) for m, a in bindings.aliases(Functions.original) if m in (home, user)]
    planned = [Binding(m, a, Functions.original, Functions.ours) for m, a in found]
    assert {b.name for b in planned} == {"bindings_home.f", "bindings_user.g"}
    bindings.install(planned)
    assert home.f is Functions.ours
    assert user.g is Functions.ours
    assert all(b.is_ours() for b in planned)
    assert bindings.restore(planned) == []
    assert home.f is Functions.original
    assert user.g is Functions.original


def test_nothing_to_replace_is_an_error():
    with pytest.raises(PatchError, match="found none"):
        bindings.install([])


class Refuses(ModuleType):
    def __setattr__(self, name, value):
        raise AttributeError(f"{name} is read-only")


class Ignores(ModuleType):
    def __setattr__(self, name, value):
        pass


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Refuses, r"bindings_bad\.f: cannot be replaced \(f is read-only"), (Ignores, r"bindings_bad\.f: assigned, but")],
    ids=["raises", "silently ignored"],
)
def test_all_or_none(module, kind, message):
    first, bad = module("bindings_first", f=Functions.original), module("bindings_bad", kind, f=Functions.original)
    planned = [Binding(m, "f", Functions.original, Functions.ours) for m in (first, bad)]
    with pytest.raises(PatchError, match=message):
        bindings.install(planned)
    assert first.f is Functions.original
    assert bad.f is Functions.original


def test_changed_since_it_was_found(module):
    first, second = module("bindings_first", f=Functions.original), module("bindings_second", f=Functions.theirs)
    with pytest.raises(PatchError, match=r"bindings_second\.f: changed"):
        bindings.install([Binding(m, "f", Functions.original, Functions.ours) for m in (first, second)])
    assert first.f is Functions.original
    assert second.f is Functions.theirs


def test_restore_leaves_what_others_put_there(module):
    home, user = module("bindings_home", f=Functions.original), module("bindings_user", f=Functions.original)
    planned = [Binding(m, "f", Functions.original, Functions.ours) for m in (home, user)]
    bindings.install(planned)
    user.f = Functions.theirs
    assert bindings.restore(planned) == [planned[1]]
    assert home.f is Functions.original
    assert user.f is Functions.theirs


def test_restore_reaches_modules_that_imported_ours_meanwhile(module):
    home = module("bindings_home", f=Functions.original)
    planned = [Binding(home, "f", Functions.original, Functions.ours)]
    bindings.install(planned)
    late = module("bindings_late", h=home.f)
    assert late.h is Functions.ours
    bindings.restore(planned)
    assert late.h is Functions.original


def test_looking_for_aliases_loads_no_lazy_module(monkeypatch, tmp_path):
    (tmp_path / "bindings_lazy.py").write_text("raise RuntimeError('loaded')")
    spec = importlib.util.spec_from_file_location("bindings_lazy", tmp_path / "bindings_lazy.py")
    loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, "bindings_lazy", lazy)
    assert (lazy, "f") not in list(bindings.aliases(Functions.original))
    with pytest.raises(RuntimeError, match="loaded"):
        vars(lazy)


def test_class_attributes():
    class Holder:
        f = Functions.original

    planned = [Binding(Holder, "f", Functions.original, Functions.ours)]
    bindings.install(planned)
    assert Holder().f.__func__ is Functions.ours
    bindings.restore(planned)
    assert Holder.__dict__["f"] is Functions.original
