"""What the patch is doing in this process, as an object that prints readably: the answer to "is it really on?"."""

from __future__ import annotations

import dataclasses

from te_ce import LossOptions
from te_ce.linear.chunks import Keep


@dataclasses.dataclass(frozen=True)
class BindingStatus:
    """One replaced attribute.

    Args:
        module: dotted name of the module or class that holds it.
        attribute: its name there.
        role: "loss", "config", "call", "layer", "native", "te", "parser" or "check".
        ours: whether it holds our replacement now.
        found: what it holds now.
    """

    module: str
    attribute: str
    role: str
    ours: bool
    found: str

    def __str__(self) -> str:
        state = "ours" if self.ours else f"NOT OURS: {self.found}"
        return f"{self.role:<6} {self.module}.{self.attribute}: {state}"


@dataclasses.dataclass(frozen=True)
class Status:
    """State of the patch in this process at the time of the call.

    Args:
        applied: between `apply()` and `revert()`.
        replace_native: whether Megatron's own entry points are replaced too.
        replace_te: whether configurations that ask for Transformer Engine's loss are served, too.
        options: what te_ce is called with; None while not applied.
        keep: of the fused linear loss; None while not applied.
        megatron: version of megatron-core, None while it is not imported.
        bindings: what was replaced; empty while not applied.
        served: losses te_ce served in this process per implementation, whoever called it.
        heads: losses asked for as "te_ce_linear" since `apply()`: "fused" with the output layer, or "on logits".
        reasons: why some of them were computed on logits.
    """

    applied: bool
    replace_native: bool
    replace_te: bool
    options: LossOptions | None
    keep: Keep | None
    megatron: str | None
    bindings: tuple[BindingStatus, ...]
    served: dict[str, int]
    heads: dict[str, int] = dataclasses.field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    @property
    def selects(self) -> dict[str, str]:
        """What serves a loss in this process, by the value of `cross_entropy_fusion_impl`; "": without fusion."""
        native = "te_ce" if self.replace_native else "Megatron"
        te = "te_ce on logits" if self.replace_te else "Transformer Engine (refused by newer releases)"
        nothing = "nothing: Megatron fails"
        return {
            "": f"{native}, unfused" if native == "Megatron" else "te_ce on logits",
            "native": f"{native}, fused" if native == "Megatron" else "te_ce on logits",
            "te": te,
            "te_ce": "te_ce on logits" if self.applied else nothing,
            "te_ce_linear": f"te_ce fused with the output layer, keep={self.keep}" if self.applied else nothing,
        }

    @property
    def intact(self) -> bool:
        """Applied, and every binding still ours."""
        return self.applied and all(binding.ours for binding in self.bindings)

    def __str__(self) -> str:
        lines = [f"megatron_patch: {'applied' if self.applied else 'not applied'}"]
        switches = f"replace_native={self.replace_native}, replace_te={self.replace_te}"
        lines.append(f"  megatron-core {self.megatron or '(not imported)'}, {switches}")
        if self.options is not None:
            lines.append(f"  {self.options}")
        lines.append("  what a configuration selects:")
        for value, loss in self.selects.items():
            fusion = f'cross_entropy_fusion_impl="{value}"' if value else "cross_entropy_loss_fusion=False"
            lines.append(f"    {fusion}: {loss}")
        lines += [f"  {binding}" for binding in self.bindings]
        counts = ", ".join(f"{name} {count}" for name, count in self.served.items())
        lines.append(f"  losses served in this process: {counts}")
        if self.heads:
            lines.append("  te_ce_linear so far: " + ", ".join(f"{name} {count}" for name, count in self.heads.items()))
        lines += [f"    on logits, because {reason}" for reason in self.reasons]
        return "\n".join(lines)
