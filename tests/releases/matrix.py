"""The table of outcomes, docs/releases.md with all of it, and the summary in README.md.

A run over all releases writes both.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.releases import rows
from tests.releases.run import Cell
from tests.releases.wheels import CHECKOUT

RESULT = Path(__file__).with_name("result.json")
README, REPORT = CHECKOUT / "README.md", CHECKOUT / "docs" / "releases.md"
_BEGIN, _END = "<!-- made by `make test-versions` -->", "<!-- end -->"

Matrix = dict[str, dict[str, Cell]]
"""Rows by release."""


def table(matrix: Matrix) -> str:
    """Markdown: rows of the matrix, a column a release, and below it what "-" means and what nobody has run."""
    versions = list(matrix)
    lines = ["| megatron-core | " + " | ".join(versions) + " |", "|---" * (len(versions) + 1) + "|"]
    for row in rows.ROWS:
        lines.append(f"| {row} | " + " | ".join(matrix[version][row].verdict for version in versions) + " |")
    legend = f"-: the release has no such thing, or not without other packages. Untested: {'; '.join(rows.UNTESTED)}."
    return "\n".join([*lines, "", legend])


def summary(matrix: Matrix) -> str:
    """Markdown for README.md: what passes and what there is not, releases in which that is the same on one line."""
    lines = ["| megatron-core | passes | does not have |", "|---|---|---|"]
    groups: list[list[str]] = []
    for version in matrix:
        if groups and _verdicts(matrix[groups[-1][0]]) == _verdicts(matrix[version]):
            groups[-1].append(version)
        else:
            groups.append([version])
    for group in groups:
        cells = matrix[group[0]]
        passed = sum(cell.verdict == "yes" for cell in cells.values())
        lacking = dict.fromkeys(row.partition(":")[0] for row, cell in cells.items() if cell.verdict == "-")
        lines.append(f"| {', '.join(group)} | {passed} of {len(cells)} | {'; '.join(lacking)} |")
    return "\n".join(lines)


def _verdicts(cells: dict[str, Cell]) -> list[str]:
    return [cell.verdict for cell in cells.values()]


def report(matrix: Matrix) -> str:
    """All of docs/releases.md."""
    reasons = sorted({note for cells in matrix.values() for cell in cells.values() for note in cell.notes})
    parts = [
        "# The plugin in the releases of megatron-core",
        "Made by `make PYTHON=python3.12 test-versions`: the tests of each row, in fresh processes on a CPU; two ranks "
        "where the row says TP=2.",
        table(matrix),
        "Reasons of what is missing:\n\n" + "\n".join(f"- {reason}" for reason in reasons),
    ]
    return "\n\n".join(parts) + "\n"


def failures(matrix: Matrix) -> list[str]:
    """Rows that fail in a release."""
    return [
        f"{version}: {row}: {', '.join(cell.notes)}"
        for version, cells in matrix.items()
        for row, cell in cells.items()
        if cell.verdict == "no"
    ]


def unseen(matrix: Matrix) -> list[str]:
    """Rows that are skipped in every release: nothing speaks for them."""
    found = []
    for row in rows.ROWS:
        reasons = {note for cells in matrix.values() for note in cells[row].notes}
        if all(cells[row].verdict == "-" for cells in matrix.values()):
            found.append(f"{row}: skipped in every release: {', '.join(sorted(reasons))}")
    return found


def save(matrix: Matrix, path: Path = RESULT) -> None:
    """Write the result of a run."""
    path.write_text(json.dumps(matrix, indent=1) + "\n")


def load(path: Path = RESULT) -> Matrix:
    """The result of the last run over all releases."""
    found = json.loads(path.read_text())
    return {
        version: {row: Cell(verdict, tuple(notes)) for row, (verdict, notes) in cells.items()}
        for version, cells in found.items()
    }


def in_readme(text: str) -> str:
    """The table that README.md holds."""
    return text.split(_BEGIN)[1].split(_END)[0].strip()


def write(matrix: Matrix) -> None:
    """docs/releases.md, and README.md's summary in the place of the one that is there."""
    REPORT.write_text(report(matrix))
    before, rest = README.read_text().split(_BEGIN)
    README.write_text(f"{before}{_BEGIN}\n{summary(matrix)}\n{_END}{rest.split(_END)[1]}")
