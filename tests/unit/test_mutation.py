"""The list of faults is true to the code, and one that survives, or is not there, is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation import __main__ as command
from tests.mutation import run
from tests.mutation.fault import Fault
from tests.mutation.faults import FAULTS
from tests.mutation.run import CHECKOUT, Place, Survived, belongs, catch, check_without, planted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_planted(fault: Fault) -> None:
    assert (CHECKOUT / fault.file).read_text().count(fault.old) == 1
    assert fault.old != fault.new
    assert 1 <= len(fault.tests) <= 3
    for test in fault.tests:
        file, _, name = test.partition("[")[0].partition("::")
        assert f"def {name}" in (CHECKOUT / file).read_text()


def test_they_are_many_and_each_has_a_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


def test_parameters_belong_to_their_test() -> None:
    assert belongs("a.py::test_it[1]", ["a.py::test_it"])
    assert belongs("a.py::test_it", ["a.py"])
    assert not belongs("a.py::test_it_all", ["a.py::test_it"])


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with two numbers and a test of one."""
    checkout = tmp_path / "checkout"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "docs").mkdir()
    (checkout / "tiny_code.py").write_text("VALUE = 1\nOTHER = 2\n")
    (checkout / "tests" / "test_code.py").write_text(
        "import pytest\nimport tiny_code\n\n\n@pytest.fixture\ndef value():\n    return 1 / tiny_code.VALUE\n\n\n"
        "def test_value(value):\n    assert tiny_code.VALUE == 1\n\n\n"
        "def test_skipped():\n    pytest.skip('never')\n"
    )
    monkeypatch.setattr(run, "CHECKOUT", checkout)
    monkeypatch.setattr(run, "_COPIED", ("tiny_code.py", "tests"))
    monkeypatch.setattr(command, "REPORT", checkout / "docs" / "mutation.md")
    return tmp_path


def fault(old: str, new: str, test: str = "test_value") -> Fault:
    return Fault(f"{old}, {new}", "tiny_code.py", old, new, (f"tests/test_code.py::{test}",))


_CAUGHT, _SURVIVOR = fault("VALUE = 1", "VALUE = 3"), fault("OTHER = 2", "OTHER = 3")


def test_one_is_caught(tiny: Path) -> None:
    assert catch(_CAUGHT, tiny) == "tests/test_code.py::test_value"


def test_one_survives(tiny: Path) -> None:
    with pytest.raises(Survived, match=r"OTHER = 2, OTHER = 3: expected one of .* to fail, pytest ended with \[0\]"):
        catch(_SURVIVOR, tiny)


@pytest.mark.parametrize(
    ("broken", "status"),
    [
        pytest.param(fault("VALUE = 1", "VALUE ="), 4, id="does not import"),
        pytest.param(fault("VALUE = 1", "VALUE = 0"), 1, id="a fixture fails"),
        pytest.param(fault("VALUE = 1", "VALUE = 3", "test_skipped"), 0, id="skipped"),
        pytest.param(fault("VALUE = 1", "VALUE = 3", "test_missing"), 4, id="no such test"),
    ],
)
def test_tests_that_do_not_run_have_noticed_nothing(tiny: Path, broken: Fault, status: int) -> None:
    with pytest.raises(Survived, match=rf"pytest ended with \[{status}\]"):
        catch(broken, tiny)


@pytest.mark.parametrize(("old", "times"), [("VALUE = 7", 0), (" = ", 2)])
def test_one_is_not_there_once(tiny: Path, old: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"expected its text once in tiny_code.py, found it {times} times"):
        planted(fault(old, "VALUE = 8"), tiny / "checkout")


@pytest.mark.parametrize("test", ["test_skipped", "test_missing"])
def test_without_any_each_must_pass(tiny: Path, test: str) -> None:
    check_without(["tests/test_code.py::test_value"], Place(), tiny)
    with pytest.raises(Survived, match=f"nothing passed of tests/test_code.py::{test}"):
        check_without([f"tests/test_code.py::{test}"], Place(), tiny)


def test_the_command(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "FAULTS", (_CAUGHT, _SURVIVOR))
    assert command.main([]) == 1
    printed = capsys.readouterr()
    assert "| VALUE = 1, VALUE = 3 | tiny_code.py | `tests/test_code.py::test_value` |" in printed.out
    assert "error: OTHER = 2, OTHER = 3: expected" in printed.err
    assert command.main(["VALUE"]) == 0
    assert not command.REPORT.exists()  # it was not over all of them
    monkeypatch.setattr(command, "FAULTS", (_CAUGHT,))
    assert command.main(["--jobs", "1"]) == 0
    assert "1 faults" in command.REPORT.read_text()
