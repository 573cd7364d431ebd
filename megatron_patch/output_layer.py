"""`ColumnParallelLinear.forward`, which defers the logits where the loss can be fused with the output layer.

Only for the output layer of a model in a forward with labels that asks for te_ce_linear, and only where the fused loss
reproduces everything that the layer does. Whatever it does not know of, it does not defer: the layer runs as ever, and
the reason is left in the scope for the loss to report.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.modules import module as modules

from megatron_patch.application import Application
from megatron_patch.deferred import Origin
from megatron_patch.model import global_group
from megatron_patch.scope import Scope, current_scope, output_layers


def make_forward(original: Callable[..., Any], layer_class: type, application: Application) -> Callable[..., Any]:
    """The replacement for `ColumnParallelLinear.forward(self, input_, weight, runtime_gather_output)`.

    input_ [s, b, H], or [s / TP, b, H] under sequence parallelism -> (logits [s, b, V / TP], bias or None).
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if scope is None or not application.active or not any(self is layer for layer in output_layers(scope.model)):
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        hidden, weight = given["input_"], given.get("weight")
        weight = self.weight if weight is None else weight
        if weight is None or tuple(weight.shape) != (self.output_size_per_partition, self.input_size):
            return original(self, *args, **kwargs)  # Megatron raises
        scope.reason = "reproducible_tp is for the loss on logits" if application.options.reproducible_tp else None
        scope.reason = scope.reason or _of_call(self, given.get("runtime_gather_output"), scope)
        scope.reason = scope.reason or _of_code(self, layer_class) or _of_settings(self)
        scope.reason = scope.reason or _of_tensors(self, hidden, weight)
        if scope.reason is not None:
            return original(self, *args, **kwargs)
        rows = hidden.shape[0] * (ranks(self) if self.sequence_parallel else 1)
        shape = (rows, *hidden.shape[1:-1], weight.shape[0])
        others = {name: value for name, value in given.items() if name not in ("self", "input_")}

        def compute(hidden: Tensor) -> Tensor:
            logits: Tensor = original(self, hidden, **others)[0]
            return logits

        return Origin(self, compute, hidden, weight, self.bias, shape, scope.origins).defer(), None

    return forward


def layer_group(layer: Any) -> ProcessGroup | None:
    """The layer's tensor-parallel group; an attribute from 0.13 on, the global group before; None: one process."""
    group: ProcessGroup | None = getattr(layer, "tp_group", None)
    return global_group() if group is None else group


def ranks(layer: Any) -> int:
    """Number of ranks that the layer's output is sharded over."""
    group = layer_group(layer)
    return 1 if group is None else group.size()


# Why the fused loss cannot stand for a call of the layer; None: nothing of that kind.


def _of_call(layer: Any, runtime_gather: bool | None, scope: Scope) -> str | None:
    """What surrounds the call."""
    gathers = layer.gather_output if runtime_gather is None else runtime_gather
    if gathers and ranks(layer) > 1:
        return "the output layer gathers its logits"
    if scope.is_checkpointed():
        return "the output layer runs inside an activation checkpoint, or without gradients, unlike the model"
    return None


def _of_code(layer: Any, layer_class: type) -> str | None:
    """Code that is not Megatron's plain layer: its class (FSDP2, ModelOpt, FP8 and adapters change it), hooks."""
    if type(layer) is not layer_class:
        return f"the output layer is a {type(layer).__qualname__}, not a plain {layer_class.__name__}"
    if "forward" in vars(layer):
        return "the output layer has a forward of its own"
    # Forward pre-hooks run before, and are allowed: Megatron's own DDP sets them.
    kinds = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(layer, kind, None) for kind in kinds) or any(getattr(modules, f"_global{kind}") for kind in kinds):
        return "the output layer has hooks, which expect logits"
    return None


def _of_settings(layer: Any) -> str | None:
    """Settings under which the layer does something else in forward or backward."""
    config = layer.config
    offloading = getattr(config, "_cpu_offloading_context", None)
    reduces = layer.allreduce_dgrad or layer.sequence_parallel
    objections = {
        "defer_embedding_wgrad_compute needs the gradient of the logits": getattr(
            config, "defer_embedding_wgrad_compute", False
        ),
        "the layer's activations are offloaded": offloading is not None and getattr(offloading, "inside_context", True),
        "the output layer is an expert's": layer.is_expert or layer.explicit_expert_comm,
        "the output layer leaves its bias to the caller": layer.skip_bias_add and layer.bias is not None,
        "the output layer does not reduce its input's gradient": ranks(layer) > 1 and not reduces,
        "the weight is a shard over more ranks (gtp_remat_size)": getattr(layer, "gtp_remat_size", 1) > 1,
        "the logits have a dtype of their own": getattr(layer, "output_dtype", None) is not None,
    }
    return next((reason for reason, holds in objections.items() if holds), None)


def _of_tensors(layer: Any, hidden: Tensor, weight: Tensor) -> str | None:
    """Tensors that are more than their values (FP8, DTensor, Megatron-FSDP), or of dtypes that only autocast unites."""
    for name, tensor in (("input", hidden), ("weight", weight)):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"the output layer's {name} is a {type(tensor).__qualname__}"
    if hasattr(weight, "__fsdp_param__"):
        return "the weight is Megatron-FSDP's"
    if torch.is_autocast_enabled(hidden.device.type):
        return "autocast is on"
    if not hidden.dtype == weight.dtype == (weight if layer.bias is None else layer.bias).dtype:
        return f"the output layer's dtypes differ: input {hidden.dtype}, weight {weight.dtype}"
    return None
