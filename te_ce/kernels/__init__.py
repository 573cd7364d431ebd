"""Triton kernels of the loss, and the check that this Triton can run them.

Kernels: `statistics` (one read of the logits), `blocks` (the same, with bits that do not depend on how the vocabulary
is cut), `merge` (statistics of parts and shards to the loss), `gradient` (recomputed from the statistics).
What they share: `walk` (over a row), `vectors` (its blocks), `rows` (addresses), `transform` (softcap and scale),
`numerics` (the loss of a row), `entropy`, `argmax`, `outputs` (what a row gives besides), `coefficients` (the gradient
of a row as a few numbers).
Launching them: `launch` and `launch_gradient` (the same functions as `te_ce.reference`), `plans` (what these share),
`shapes` (of blocks), `launcher` (starts what was started before).
"""

from __future__ import annotations

_OLDEST = (3, 6)


def _require_triton() -> None:
    try:
        import triton
    except ImportError as error:
        raise RuntimeError(
            "the loss on this device needs Triton >= 3.6, which is not installed: pip install 'triton>=3.6', "
            "or set TE_CE_BACKEND=torch for the slow plain-torch loss"
        ) from error
    version = str(getattr(triton, "__version__", "unknown"))
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if found < _OLDEST:
        raise RuntimeError(
            f"the loss on this device needs Triton >= 3.6, found {version}: pip install 'triton>=3.6', "
            "or set TE_CE_BACKEND=torch for the slow plain-torch loss"
        )


_require_triton()
