"""Trees of stand-in modules, shaped as the releases of megatron-core are where the loss is concerned.

Same module paths, names, signatures, aliases and attributes as the release; nothing of what they compute but a plain
single-rank loss, and for Transformer Engine, where it is there, one that is wrong on purpose: it says who was called.
So the differences between releases are tested without installing each of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_patch


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
        te_arguments: of the wrapper around Transformer Engine's loss; None: there is none.
        refuses_te: whether the arguments' check refuses "te", and the configuration warns of it.
    """

    version: str
    implementation_field: bool = True
    unfused_takes_group: bool = False
    fused_takes_group: bool = True
    holder: str | None = None
    model_group: bool = False
    te_arguments: str | None = "tp_group, is_cg_capturable=False"
    refuses_te: bool = False


RELEASES = {
    release.version: release
    for release in (
        Release("0.10.0", implementation_field=False, fused_takes_group=False, te_arguments=None),
        Release("0.12.0", te_arguments="tp_group"),
        Release("0.14.0", holder="model_comm_pgs"),
        Release("0.15.3", holder="pg_collection"),
        Release("0.16.1", holder="pg_collection", model_group=True),
        Release("0.19.2", holder="pg_collection", model_group=True, unfused_takes_group=True, refuses_te=True),
    )
}


def write(release: Release, root: Path, te: bool = False, training: bool = False) -> None:
    """Write the package `megatron.core` of this release under `root`.

    Args:
        te: as if Transformer Engine were installed.
        training: with `megatron.training`.
    """
    files = {f"core/{path}": text for path, text in _files(release).items()}
    files |= _te_files(release, te)
    if training:
        files |= _training_files(release)
    for path, text in files.items():
        file = root / "megatron" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    for folder in {p.parent for p in (root / "megatron").rglob("*.py")} - {root / "megatron"}:
        (folder / "__init__.py").touch()


@contextlib.contextmanager
def installed(release: Release, root: Path, monkeypatch: Any, **parts: bool) -> Iterator[None]:
    """Within: the stand-in package is `megatron.core` of this process; the real one afterwards, nothing patched."""
    write(release, root, **parts)

    def forget() -> dict[str, Any]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "megatron"}

    kept = forget()
    monkeypatch.syspath_prepend(root)
    importlib.invalidate_caches()
    importlib.import_module("megatron.core.models.gpt")
    yield
    megatron_patch.revert()
    forget()
    sys.modules.update(kept)


def module(name: str) -> Any:
    """A module of the stand-in package."""
    return importlib.import_module(f"megatron.core.{name}")


def make_model(release: Release, group: Any = None, **fields: Any) -> Any:
    """A stand-in GPTModel; its group is the model's own, or the global one in releases that know no other."""
    late = {}
    if not release.implementation_field and "cross_entropy_fusion_impl" in fields:
        late["cross_entropy_fusion_impl"] = fields.pop("cross_entropy_fusion_impl")
    config = module("transformer.transformer_config").TransformerConfig(**fields)
    vars(config).update(late)
    model = module("models.gpt").GPTModel(config, group)
    if not release.holder:
        module("parallel_state").GROUP = group
    return model


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
    import_te = "from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy"
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
        "tensor_parallel/layers.py": f"""
            import torch

            class ColumnParallelLinear(torch.nn.Module):
                def __init__(self, input_size, output_size, config, group=None):
                    super().__init__()
                    self.config, self.input_size, self.output_size_per_partition = config, input_size, output_size
                    self.output_size = output_size * (1 if group is None else group.size())
                    self.weight = torch.nn.Parameter(torch.randn(output_size, input_size))
                    self.bias = None
                    self.gather_output = self.skip_bias_add = self.is_expert = self.explicit_expert_comm = False
                    self.sequence_parallel = self.gradient_accumulation_fusion = False
                    self.allreduce_dgrad = group is not None
                    if {bool(release.holder)}:
                        self.tp_group = group

                def forward(self, input_, weight=None, runtime_gather_output=None):
                    return torch.nn.functional.linear(input_, self.weight if weight is None else weight), None
            """,
        "fusions/fused_cross_entropy.py": _loss(fused, "fused_vocab_parallel_cross_entropy", fused, fused),
        "model_parallel_config.py": f"""
            import warnings
            from dataclasses import dataclass

            @dataclass
            class ModelParallelConfig:
                tensor_model_parallel_size: int = 1
                cross_entropy_loss_fusion: bool = False
                {impl}

                def __post_init__(self):
                    self.checked = True
                    if {release.refuses_te} and self.cross_entropy_fusion_impl == "te":
                        warnings.warn("te has known stability issues")
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
            {import_te if release.te_arguments else ""}

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
                        elif te_parallel_cross_entropy is None:
                            raise RuntimeError("Transformer Engine is missing")
                        else:
                            loss = te_parallel_cross_entropy(logits, labels, {holder})
                    else:
                        loss = tensor_parallel.vocab_parallel_cross_entropy(
                            logits, labels{", tp_group=self.tp_group" if release.unfused_takes_group else ""}
                        )
                    return loss.transpose(0, 1).contiguous()
            """,
        "models/gpt/__init__.py": """
            from megatron.core.models.common.language_module.language_module import LanguageModule

            class GPTModel(LanguageModule):
                def forward(self, hidden, labels=None):
                    logits, _ = self.output_layer(hidden)
                    return logits if labels is None else self.compute_language_model_loss(labels, logits)
            """,
    }


def _te_files(release: Release, te: bool) -> dict[str, str]:
    if not release.te_arguments:
        return {}
    function = f"""
        def te_parallel_cross_entropy(logits, labels, {release.te_arguments}):
            return logits.sum(-1) * 0 - 17
        """
    path = "core/extensions/transformer_engine.py"
    return {path: function if te else "te_parallel_cross_entropy = None"}


def _parser(release: Release) -> str:
    """Hand-written choices up to 0.15, generated ones after; in 0.10 neither the flag nor a function of its own."""
    if not release.implementation_field:
        return ""
    choices = "IMPL.__args__" if release.model_group else "['native', 'te']"
    return f"""
            from typing import Literal
            IMPL = Literal['native', 'te']

            def add_megatron_arguments(parser):
                parser.add_argument("--deterministic-mode", action="store_true")
                parser.add_argument("--micro-batch-size", type=int, default=1)
                group = parser.add_argument_group("network size")
                group.add_argument("--cross-entropy-loss-fusion", action="store_true")
                group.add_argument("--cross-entropy-fusion-impl", default="native", choices={choices})
                return parser

            def parse_args(words):
                return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)
"""


def _training_files(release: Release) -> dict[str, str]:
    return {
        "training/arguments.py": f"""
            import argparse
{_parser(release)}
            def validate_args(args, defaults={{}}):
                args.validated = defaults
                assert args.micro_batch_size, "micro_batch_size"
                fused = args.cross_entropy_loss_fusion
                if {release.refuses_te}:
                    assert not (fused and args.cross_entropy_fusion_impl == "te"), "te is disabled"
                assert not (args.deterministic_mode and fused), "not deterministic"
                return args
            """,
        "training/yaml_arguments.py": """
            def validate_yaml(args, defaults={}):
                args.validated = defaults
                return args
            """,
        "training/initialize.py": """
            from megatron.training.arguments import validate_args
            from megatron.training.yaml_arguments import validate_yaml
            """,
    }
