"""One batch's gradients of every loss, tensor by tensor, against those of Megatron's unfused loss and of float64.

    torchrun --nproc-per-node R -m benchmarks.convergence.gradients --out DIR [section.key=value ...]

The model, its data and its settings are those of examples/pretrain_gpt.py. The gradients are what the optimizer gets:
Megatron's float32 buffers. On one rank they are also compared with those of a float64 loss of the same logits, whose
gradient is rounded once to the logits' dtype: what is then left is the loss's own error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.results import as_markdown

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RESULT = "gradients.json"
LOSSES = ("unfused", "fused", "te_ce", "te_ce_linear")
_FLOAT64 = "float64"
_COLUMNS = ["loss", "compared with", "mean loss", "median", "largest", "of"]


def main(command: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the command line on every rank; rank 0 writes DIR/gradients.json. Returns its rows."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.convergence.gradients", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(command)
    sys.path.insert(0, str(_EXAMPLES))
    from gpt import device
    from gpt.config import default_name, load, tensor_parallel_size
    from megatron.core import parallel_state

    import megatron_patch

    config = load(_EXAMPLES.parent / "configs" / default_name(), arguments.overrides)
    ranks = device.start(config)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size(config, ranks.world_size))
    with megatron_patch.patched():
        rows = [{**row, "settings": " ".join(arguments.overrides)} for row in _compare(config, ranks)]
    if ranks.is_first:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / RESULT).write_text(json.dumps(rows, indent=1))
        print(table(arguments.out / RESULT))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return rows


def table(path: Path) -> str:
    """The rows of a gradients.json as a table, with its legend."""
    rows = json.loads(path.read_text())
    legend = (
        f"Relative difference in the 2-norm of each parameter's gradient, over {rows[0]['tensors']} tensors on "
        f"{rows[0]['ranks']} rank(s): median, largest, and the tensor with the largest. "
        f"`torchrun --nproc-per-node {rows[0]['ranks']} -m benchmarks.convergence.gradients {rows[0]['settings']}`"
    )
    return as_markdown([[str(row[name]) for name in _COLUMNS] for row in rows], _COLUMNS) + "\n\n" + legend


def _compare(config: Any, ranks: Any) -> list[dict[str, Any]]:
    from gpt import data, model
    from pretrain_gpt import LOSS_FIELDS

    text = data.load(config, ranks, lambda line: None)
    tp = dist.get_world_size()
    vocab = data.padded_vocab_size(text.vocab_size, config.model.make_vocab_size_divisible_by, tp)
    batch = next(data.micro_batches(text.train, config, 0, 1, ranks.device))
    names = (*LOSSES, _FLOAT64) if tp == 1 else LOSSES
    values, gradients = {}, {}
    for name in names:
        built = model.build(config, tp, vocab, LOSS_FIELDS["unfused" if name == _FLOAT64 else name], ranks.device)
        values[name], gradients[name] = _step(built, batch, name == _FLOAT64)
    references = [name for name in ("unfused", _FLOAT64) if name in names]
    pairs = [(name, reference) for reference in references for name in LOSSES if name != reference]
    return [
        {"loss": name, "compared with": reference, "mean loss": f"{values[name]:.7f}", "ranks": tp}
        | _distances(gradients[name], gradients[reference])
        for name, reference in pairs
    ]


def _step(model: Any, batch: dict[str, Tensor], in_float64: bool) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of a batch, and every parameter's gradient as the optimizer gets it."""
    model.zero_grad_buffer()
    labels = None if in_float64 else batch["labels"]
    output = model(batch["tokens"], batch["position_ids"], None, labels=labels)
    if in_float64:
        loss = torch.nn.functional.cross_entropy(output.double().flatten(0, 1), batch["labels"].flatten())
    else:
        loss = (output.float() * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    loss.backward()
    return loss.item(), {name: p.main_grad.clone() for name, p in model.named_parameters()}


def _distances(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Any]:
    """Over all ranks: a tensor that is whole on every rank counts as often above the line as below."""
    found: dict[str, float] = {}
    for name, expected in reference.items():
        squares = torch.stack([(ours[name] - expected).double().square().sum(), expected.double().square().sum()])
        dist.all_reduce(squares)
        difference, whole = squares.sqrt().tolist()
        found[name] = difference / whole if whole else difference
    worst = max(found, key=lambda name: found[name])
    median = sorted(found.values())[len(found) // 2]
    return {"median": f"{median:.2e}", "largest": f"{found[worst]:.2e}", "of": worst, "tensors": len(found)}


if __name__ == "__main__":
    main()
