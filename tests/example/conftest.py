"""The example's parts are imported as its script imports them: from the folder that holds the script."""

import sys
import sysconfig
import warnings
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "examples"))

with warnings.catch_warnings():
    # Megatron warns on import: of what is not installed, and of what its dependencies deprecate.
    warnings.simplefilter("ignore")
    import gpt.data
    import gpt.model
    import gpt.train  # noqa: F401


@pytest.fixture(scope="session")
def small_text() -> Path:
    """A folder of real text that any Python has: some 30 files, half a megabyte."""
    return Path(sysconfig.get_path("stdlib")) / "asyncio"
