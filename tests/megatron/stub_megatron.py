"""Trees of stand-in modules, shaped as the releases of megatron-core are where the loss is concerned.

Same module paths, names, signatures, aliases and attributes as the release; nothing of what they compute but a plain
single-rank loss. So the differences between releases are tested without installing each of them.
"""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Release:
    """What differs between releases.

    Args:
        version: as in `megatron.core.__version__`.
        implementation_field: whether the configuration has `cross_entropy_fusion_impl`.
        unfused_takes_group: whether the unfused loss has a `tp_group` argument.
        fused_takes_group: the same for the fused one.
        holder: attribute of the model whose `.tp` is the tensor-parallel group; None: the global group only.
        model_group: whether the model has `tp_group`.
    """

    version: str
    implementation_field: bool = True
    unfused_takes_group: bool = False
    fused_takes_group: bool = True
    holder: str | None = None
    model_group: bool = False


RELEASES = {
    release.version: release
    for release in (
        Release("0.10.0", implementation_field=False, fused_takes_group=False),
        Release("0.12.0"),
        Release("0.14.0", holder="model_comm_pgs"),
        Release("0.15.3", holder="pg_collection"),
        Release("0.16.1", holder="pg_collection", model_group=True),
        Release("0.19.2", holder="pg_collection", model_group=True, unfused_takes_group=True),
    )
}


def write(release: Release, root: Path) -> None:
    """Write the package `megatron.core` of this release under `root`."""
    for path, text in _files(release).items():
        file = root / "megatron" / "core" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    for folder in {p.parent for p in (root / "megatron" / "core").rglob("*.py")}:
        (folder / "__init__.py").touch()


def _loss(class_parameters: str, function: str, function_parameters: str, arguments: str) -> str:
    return f"""
        import torch

        class _VocabParallelCrossEntropy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, vocab_parallel_logits, target{class_parameters}):
                log_probs = vocab_parallel_logits.float().log_softmax(-1)
                ctx.save_for_backward(log_probs, target)
                return -log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)

            @staticmethod
            def backward(ctx, grad):
                log_probs, target = ctx.saved_tensors
                one_hot = torch.nn.functional.one_hot(target.clamp(min=0), log_probs.shape[-1])
                return ((log_probs.exp() - one_hot) * grad.unsqueeze(-1), *(None,) * {class_parameters.count(",") + 1})

        def {function}(vocab_parallel_logits, target{function_parameters}):
            return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target{arguments})
        """


def _files(release: Release) -> dict[str, str]:
    unfused = ", label_smoothing=0.0" + (", tp_group=None" if release.unfused_takes_group else "")
    unfused_arguments = ", label_smoothing" + (", tp_group" if release.unfused_takes_group else "")
    fused = ", tp_group" if release.fused_takes_group else ""
    holder = f"self.{release.holder}.tp" if release.holder else "parallel_state.get_tensor_model_parallel_group(False)"
    impl = "cross_entropy_fusion_impl: str = 'native'" if release.implementation_field else "pass"
    native = f"fused_vocab_parallel_cross_entropy(logits, labels{', ' + holder if release.fused_takes_group else ''})"
    return {
        "__init__.py": f"""
            from megatron.core import parallel_state, tensor_parallel
            __version__ = {release.version!r}
            """,
        "parallel_state.py": """
            GROUP = None

            def get_tensor_model_parallel_group(check_initialized=True):
                assert GROUP is not None or not check_initialized, "not initialized"
                return GROUP
            """,
        "tensor_parallel/__init__.py": "from .cross_entropy import vocab_parallel_cross_entropy",
        "tensor_parallel/cross_entropy.py": _loss(unfused, "vocab_parallel_cross_entropy", unfused, unfused_arguments),
        "fusions/fused_cross_entropy.py": _loss(fused, "fused_vocab_parallel_cross_entropy", fused, fused),
        "model_parallel_config.py": f"""
            from dataclasses import dataclass

            @dataclass
            class ModelParallelConfig:
                tensor_model_parallel_size: int = 1
                cross_entropy_loss_fusion: bool = False
                {impl}

                def __post_init__(self):
                    self.checked = True
            """,
        "transformer/transformer_config.py": """
            from dataclasses import dataclass
            from megatron.core.model_parallel_config import ModelParallelConfig

            @dataclass
            class TransformerConfig(ModelParallelConfig):
                num_layers: int = 1

                def __post_init__(self):
                    super().__post_init__()
            """,
        "models/common/language_module/language_module.py": f"""
            import types
            import torch
            from megatron.core import parallel_state, tensor_parallel
            from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

            class LanguageModule(torch.nn.Module):
                def __init__(self, config, group=None):
                    super().__init__()
                    self.config = config
                    if {release.holder!r}:
                        setattr(self, {release.holder!r}, types.SimpleNamespace(tp=group))
                    if {release.model_group}:
                        self.tp_group = group

                def compute_language_model_loss(self, labels, logits):
                    labels = labels.transpose(0, 1).contiguous()
                    if self.config.cross_entropy_loss_fusion:
                        if getattr(self.config, "cross_entropy_fusion_impl", "native") == "native":
                            loss = {native}
                    else:
                        loss = tensor_parallel.vocab_parallel_cross_entropy(
                            logits, labels{", tp_group=self.tp_group" if release.unfused_takes_group else ""}
                        )
                    return loss.transpose(0, 1).contiguous()
            """,
        "models/gpt/__init__.py": """
            from megatron.core.models.common.language_module.language_module import LanguageModule

            class GPTModel(LanguageModule):
                pass
            """,
    }
