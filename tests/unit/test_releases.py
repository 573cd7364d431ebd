"""The runner of the support matrix: what it makes of outcomes, and that what is written down is what it found."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.releases import __main__ as command
from tests.releases import matrix, rows, run
from tests.releases.run import Cell, Unusable, judge
from tests.releases.wheels import CHECKOUT, RELEASES


def outcomes(**changed: str) -> dict[str, set[str]]:
    """One passed test for every beginning of every row, but for those changed, by row."""
    return {
        f"{test}::test_x" if test.endswith(".py") else test: {changed.get(row, "passed")}
        for row, tests in rows.ROWS.items()
        for test in tests
    }


def test_cells() -> None:
    found = judge(outcomes(Mamba="failed", T5="skipped: no Apex"))
    assert found["Mamba"].verdict == "no"
    assert found["Mamba"].notes == rows.ROWS["Mamba"]
    assert found["T5"] == Cell("-", ("no Apex",))
    assert {cell.verdict for row, cell in found.items() if row not in ("Mamba", "T5")} == {"yes"}


def test_a_failure_on_one_rank_is_one() -> None:
    node = rows.ROWS["te_ce, TP=2"][0]
    assert judge(outcomes() | {node: {"passed", "failed"}})["te_ce, TP=2"] == Cell("no", (node,))


def test_a_broken_fixture_is_a_failure() -> None:
    assert judge(outcomes(Mamba="error"))["Mamba"] == Cell("no", rows.ROWS["Mamba"])


def test_a_row_without_a_test_is_an_error() -> None:
    without = {node: found for node, found in outcomes().items() if "test_t5" not in node}
    with pytest.raises(Unusable, match="T5: expected tests, found none"):
        judge(without)


def test_a_file_that_does_not_import_is_an_error() -> None:
    with pytest.raises(Unusable, match=r"could not be collected: tests/megatron/x\.py"):
        judge(outcomes() | {"tests/megatron/x.py": {"error"}})


def test_what_fails_and_what_nothing_speaks_for() -> None:
    good = judge(outcomes())
    absent = judge(outcomes(T5="skipped: no Apex"))
    assert matrix.failures({"1": good, "2": absent}) == matrix.unseen({"1": good, "2": absent}) == []
    assert matrix.unseen({"1": absent, "2": absent}) == ["T5: skipped in every release: no Apex"]
    (line,) = matrix.failures({"1": good, "2": judge(outcomes(Mamba="failed"))})
    assert line.startswith("2: Mamba: tests/megatron/")


def test_releases_that_are_alike_share_a_line() -> None:
    good, absent = judge(outcomes()), judge(outcomes(T5="skipped: no Apex"))
    lines = matrix.summary({"1": absent, "2": absent, "3": good}).splitlines()[2:]
    assert lines == [f"| 1, 2 | {len(good) - 1} of {len(good)} | T5 |", f"| 3 | {len(good)} of {len(good)} |  |"]


def test_documents_show_the_last_run() -> None:
    last = matrix.load()
    assert tuple(last) == RELEASES
    assert all(tuple(cells) == tuple(rows.ROWS) for cells in last.values())
    assert matrix.failures(last) == matrix.unseen(last) == []
    assert matrix.in_readme(matrix.README.read_text()) == matrix.summary(last)
    assert matrix.REPORT.read_text() == matrix.report(last)


def test_rows_name_files_that_exist() -> None:
    for folder in ("tests/megatron", "tests/distributed", "tests/training"):
        assert rows.files(folder)
        assert all((CHECKOUT / file).is_file() for file in rows.files(folder))


MOVED = {
    "renamed": ("def renamed(self, labels", "expected in megatron-core, not found"),
    "changed": ("def compute_language_model_loss(self, x, labels", "expected parameters"),
}


@pytest.mark.parametrize(("now", "message"), MOVED.values(), ids=MOVED)
def test_a_release_in_which_a_symbol_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], now: str, message: str
) -> None:
    """The command fails, and the plugin says what was expected, the version found and those supported."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    (core,) = spec.submodule_search_locations or ()
    shutil.copytree(core, tmp_path / "megatron" / "core")
    file = tmp_path / "megatron/core/models/common/language_module/language_module.py"
    text = file.read_text()
    assert "def compute_language_model_loss(self, labels" in text
    file.write_text(text.replace("def compute_language_model_loss(self, labels", now))
    monkeypatch.setattr(rows, "ROWS", {"orders": ("tests/megatron/test_megatron_processes.py::test_import_orders",)})
    monkeypatch.setattr(run, "_commands", lambda: [[*run._PYTEST, "-n", "0", *rows.files("tests/megatron")]])
    assert command.main(["--path", str(tmp_path)]) == 1
    assert "| orders | no |" in capsys.readouterr().out
    said = _status(tmp_path)
    assert message in said
    assert "this is megatron-core 0." in said
    assert "supported is 0.10 to 0.19" in said


def _status(folder: Path) -> str:
    """What `python -m megatron_patch status` complains of there."""
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(CHECKOUT)]), "PYTHONWARNINGS": "ignore"}
    line = [sys.executable, "-m", "megatron_patch", "status"]
    done = subprocess.run(line, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr
