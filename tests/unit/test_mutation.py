"""The list of faults is true to the code, and one that survives, or is not there, is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import run
from tests.mutation.faults import FAULTS, Fault
from tests.mutation.run import CHECKOUT, Survived, catch, check_without, planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_it_can_be_planted(fault: Fault) -> None:
    assert (CHECKOUT / fault.file).read_text().count(fault.old) == 1
    assert fault.old != fault.new
    assert (CHECKOUT / fault.tests.partition("::")[0]).exists()


def test_they_are_many_and_each_has_a_name() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS) >= 25


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one function and its test."""
    checkout = tmp_path / "checkout"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "code.py").write_text("VALUE = 1\nOTHER = 2\n")
    (checkout / "tests" / "test_code.py").write_text(
        "import importlib.util\nspec = importlib.util.spec_from_file_location('code', 'code.py')\n"
        "code = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(code)\n\n\n"
        "def test_value():\n    assert code.VALUE == 1\n"
    )
    monkeypatch.setattr(run, "CHECKOUT", checkout)
    monkeypatch.setattr(run, "_COPIED", ("code.py", "tests"))
    return tmp_path


def fault(old: str, new: str) -> Fault:
    return Fault("other value", "code.py", old, new, "tests/test_code.py")


def test_one_is_caught(tiny: Path) -> None:
    check_without("tests/test_code.py", 1, tiny)
    assert catch(fault("VALUE = 1", "VALUE = 3"), tiny) == "tests/test_code.py::test_value"


def test_one_survives(tiny: Path) -> None:
    with pytest.raises(Survived, match=r"other value: .* ended with 0"):
        catch(fault("OTHER = 2", "OTHER = 3"), tiny)


def test_one_breaks_the_collection(tiny: Path) -> None:
    with pytest.raises(Survived, match="ended with"):
        catch(fault("VALUE = 1", "VALUE ="), tiny)


def test_one_is_not_there(tiny: Path) -> None:
    with pytest.raises(ValueError, match="found it 0 times"):
        planted(fault("VALUE = 7", "VALUE = 8"), tiny / "checkout")
