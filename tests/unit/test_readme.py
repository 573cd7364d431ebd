"""README's claims that a machine can check: its Python runs, its paths exist, its length."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


def test_the_python_example_runs() -> None:
    scope: dict[str, object] = {}
    exec(_blocks("python")[0], scope)
    assert scope["loss"].isfinite()  # type: ignore[attr-defined]
    assert scope["logits"].grad is not None  # type: ignore[attr-defined]


def test_every_file_exists_and_every_module_is_listed() -> None:
    tree = _blocks("")[-1]
    folder, listed = Path(), set()
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = Path(name)
        path = folder / name if line.startswith(" ") else folder
        assert (ROOT / path).exists(), path
        listed.add(path)
    missing = [path for path in (ROOT / "te_ce").glob("*.py") if Path("te_ce") / path.name not in listed]
    assert [path.name for path in missing] == ["__init__.py"]


def test_named_paths_exist() -> None:
    for path in re.findall(r"`((?:te_ce|examples|configs|tests|benchmarks)/[\w/.]+)`", TEXT):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"`?make (\w+)`?", TEXT):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_the_megatron_example_runs() -> None:
    script = _blocks("python")[1]
    assert "megatron_patch.apply()" in script
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "LanguageModule.compute_language_model_loss: ours" in done.stdout


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) < 150
