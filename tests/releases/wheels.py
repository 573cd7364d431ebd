"""The releases of megatron-core, as published, unpacked side by side: none of them is installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = CHECKOUT / ".cache" / "megatron"

RELEASES = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""The newest of every minor version."""

RELEASE = "TE_CE_RELEASE"
"""Environment variable: the folder of the release that the tests of its training program are to take."""

WITH_TRAINING = (0, 17)
"""From here on wheels hold `megatron.training`, and ask for Python 3.12; `megatron.core` runs on 3.11 as well."""


def fetch(version: str) -> Path:
    """The folder that holds the release's `megatron`; downloaded and unpacked where it is not there yet.

    Raises:
        subprocess.CalledProcessError: the index does not have it.
    """
    folder = CACHE / version
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=CACHE) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--python-version", "3.12" if has_training(version) else "3.11"]
        subprocess.run([*command, f"megatron-core=={version}", "--dest", temporary], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        _complete(unpacked / "megatron" / "core")
        try:
            unpacked.rename(folder)
        except OSError:
            # Another run may have been faster: what it has put there is as good.
            if not folder.is_dir():
                raise
    return folder


def has_training(version: str) -> bool:
    """Whether the wheel holds Megatron's training program."""
    major, minor, *_ = version.split(".")
    return (int(major), int(minor)) >= WITH_TRAINING


def _complete(core: Path) -> None:
    """The compiled helpers of the data sets for this Python: of the installed release, where the wheel's are another's.

    Their source has not changed in between, and Megatron would compile them anew.
    """
    helpers = f"helpers_cpp.cpython-{sys.version_info.major}{sys.version_info.minor}-*.so"
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or list((core / "datasets").glob(helpers)):
        return
    for folder in spec.submodule_search_locations or []:
        for file in (Path(folder) / "datasets").glob(helpers):
            shutil.copy(file, core / "datasets")
