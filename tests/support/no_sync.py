"""What shows a host that waits for the device, on a CPU too."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

_SYNCS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "item", "_to_copy_to_host")


class NoHostSync(TorchDispatchMode):
    """Raises on every operation that would read device data on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket.__name__ in _SYNCS:
            raise AssertionError(f"host synchronisation: {func}")
        return func(*args, **(kwargs or {}))
