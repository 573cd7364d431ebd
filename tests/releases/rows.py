"""The rows of the support matrix: which tests speak for what.

A row holds the beginnings of the node ids of its tests. Those under tests/distributed run on two ranks. In a release
that lacks what a row is about, all of its tests are skipped, with the reason.
"""

from __future__ import annotations

_M, _D, _T = "tests/megatron/test_megatron_", "tests/distributed/test_megatron_", "tests/training/test_"

ROWS: dict[str, tuple[str, ...]] = {
    "patched before and after Megatron's imports": (f"{_M}processes.py::test_import_orders",),
    "reverted, by identity": (f"{_M}flag.py::test_revert", f"{_M}linear_scope.py::test_revert"),
    "status and log": (f"{_M}processes.py::test_status", f"{_M}flag.py::test_log", f"{_M}linear_scope.py::test_log"),
    "te_ce, GPTModel": (f"{_M}flag.py::test_flag", f"{_M}flag.py::test_options"),
    "te_ce, TP=2": (f"{_D}tp.py::test_flag", f"{_D}tp.py::test_options"),
    "Megatron's own losses replaced": (f"{_M}native.py", f"{_D}tp.py::test_native", f"{_D}tp.py::test_model_without"),
    "Transformer Engine's loss replaced": (f"{_M}te_model.py", f"{_D}tp.py::test_replace_te"),
    "te_ce_linear, GPTModel": (f"{_M}linear.py::test_fused", f"{_M}linear.py::test_options"),
    "te_ce_linear, TP=2, sequence parallel": (f"{_D}linear_tp.py::test_fused", f"{_D}linear_tp.py::test_frozen"),
    "te_ce_linear into main_grad": (f"{_M}main_grad.py", f"{_D}linear_tp.py::test_main_grad"),
    "multi-token prediction": (f"{_M}linear.py::test_multi", f"{_D}linear_tp.py::test_multi"),
    "pipeline stages, interleaved stages, tied embeddings over them": (f"{_D}pipeline.py",),
    "context parallelism": (f"{_D}context.py::test_parts", f"{_D}context.py::test_heads"),
    "activation recompute": (f"{_M}features.py::test_activation",),
    "deterministic mode": (f"{_M}features.py::test_deterministic",),
    "calculate_per_token_loss": (f"{_M}features.py::test_the_loss",),
    "acceptance rates of multi-token prediction": (f"{_M}features.py::test_acceptance",),
    "BERT": (f"{_M}features.py::test_bert",),
    "Mamba": (f"{_M}linear_models.py::test_stacks[Mamba",),
    "Hybrid": (f"{_M}linear_models.py::test_stacks[Hybrid",),
    "T5": (f"{_M}linear_models.py::test_t5",),
    "megatron.training: TP=2": (f"{_T}pretrain.py::test_tensor",),
    "megatron.training: checkpoint saved and resumed": (f"{_T}pretrain.py::test_checkpoint",),
    "megatron.training: pipeline stages": (f"{_T}pretrain.py::test_pipeline",),
    "megatron.training: deterministic mode": (f"{_T}pretrain.py::test_deterministic",),
    "megatron.training: --te-ce-* options": (f"{_T}pretrain.py::test_an_option",),
    "MuP": (f"{_M}linear.py::test_mup",),
    "output_processor": (f"{_M}linear_scope.py::test_output_processor",),
}

UNTESTED = (
    "Transformer Engine's layers and FP8 output layers",
    "Apex",
    "Megatron-FSDP",
    "expert parallelism",
    "te_ce_linear over NCCL",
    "more than two GPUs",
)
"""What could not be run on the machines at hand; it may work."""


def of(node: str) -> list[str]:
    """The rows that a test speaks for."""
    return [row for row, tests in ROWS.items() if any(node.startswith(test) for test in tests)]


def files(folder: str) -> list[str]:
    """The files of a folder that any row needs."""
    tests = (test.split("::")[0] for row in ROWS.values() for test in row)
    return sorted({test for test in tests if test.startswith(f"{folder}/")})
