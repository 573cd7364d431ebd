"""All faults."""

from __future__ import annotations

from tests.mutation.fault import Fault
from tests.mutation.of_autograd import OF_AUTOGRAD
from tests.mutation.of_kernels import OF_KERNELS
from tests.mutation.of_linear import OF_LINEAR
from tests.mutation.of_megatron import OF_MEGATRON
from tests.mutation.of_twin import OF_TWIN

FAULTS: tuple[Fault, ...] = (*OF_KERNELS, *OF_TWIN, *OF_AUTOGRAD, *OF_LINEAR, *OF_MEGATRON)
