"""Property: real ranks, on logits and fused. The first rank draws for all, and judges.

`torchrun --nproc-per-node 2 -m tests.fuzz.ranks 1000` runs so many examples; tests/distributed/test_fuzz.py a few.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.fuzz import linear as linear_fuzz
from tests.fuzz import strategies as draws
from tests.fuzz.judge import Expected, check_reduced, counted
from tests.fuzz.linear import Layer
from tests.fuzz.shards import Sharded, check_values
from tests.fuzz.tally import Tally
from tests.fuzz.upstream import as_output, backward, named, used
from tests.fuzz.values import batch
from tests.support import linear
from tests.support.bits import same_bits
from tests.support.linear_ranks import shard_of
from tests.support.subject import Subject


@dataclasses.dataclass(frozen=True)
class FusedOverRanks:
    """A layer whose weight is cut into `widths`."""

    layer: Layer
    widths: tuple[int, ...]
    sequence_parallel: bool


@st.composite
def over_ranks(draw: Any, ranks: int, float64: bool) -> Sharded | FusedOverRanks:
    """Any loss on logits, or a fused one, over so many ranks; float64 for the twin alone."""
    if draw(st.booleans()):
        cut = draw(st.lists(st.integers(0, 130), min_size=ranks, max_size=ranks).filter(any).map(tuple))
        values = draw(draws.values())
        return Sharded(
            rows=draw(draws.rows(draws.LONGEST)),
            widths=cut,
            dtype=draw(draws.dtypes(float64)),
            values=values,
            options=draw(draws.options(sum(cut), values, ("none", "sum", "mean"))),
            outputs=draw(draws.outputs()),
            without_gradient=draw(st.frozensets(st.sampled_from(("log_probs", "entropy", "lse")), max_size=2)),
            part=None,
        )
    cut = draw(st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks).filter(any).map(tuple))
    layer = draw(linear_fuzz.layer(float64, columns=st.just(sum(cut))))
    sequence_parallel = draw(st.booleans())
    if sequence_parallel:
        layer = dataclasses.replace(layer, rows=(ranks * draw(st.integers(0, 3)), *layer.rows[1:]))
    # A rank that wants no gradient of what others want one of is a disagreement; here all want all.
    return FusedOverRanks(dataclasses.replace(layer, frozen=frozenset()), cut, sequence_parallel)


def explore(subject: Subject, group: ProcessGroup, examples: int, tally: Tally, derandomize: bool = True) -> None:
    """Run so many examples, the same every time or others. Every rank calls it; the first one raises what is found."""
    if dist.get_rank(group) > 0:
        while (example := _broadcast(None, group)) is not None:
            dist.gather_object(_attempt(subject, example, group), None, group=group, group_dst=0)
        return

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=derandomize,
        phases=(Phase.generate,) if derandomize else (Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(over_ranks(group.size(), subject.name.startswith("torch")))
    def prop(example: Any) -> None:
        tally.note(example)
        _broadcast(example, group)
        results: list[Any] = [None] * group.size()
        dist.gather_object(_attempt(subject, example, group), results, group=group, group_dst=0)
        for result in results:
            assert not isinstance(result, str), result
        (judge_logits if isinstance(example, Sharded) else judge_fused)(subject, example, results)

    try:
        prop()
    finally:
        _broadcast(None, group)


def _broadcast(example: Any, group: ProcessGroup) -> Any:
    box = [example]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def _attempt(subject: Subject, example: Any, group: ProcessGroup) -> Any:
    """This rank's part; what went wrong as text, so that no rank waits for another."""
    run: Callable[..., Any] = run_logits if isinstance(example, Sharded) else run_fused
    try:
        return run(subject, example, group)
    except Exception as error:
        return f"rank {dist.get_rank(group)}: {type(error).__name__}: {error}"


def scalar_or_rows(grads: Any, reduction: str) -> Any:
    """Upstream gradients, of the loss one number where it is reduced."""
    if reduction == "none":
        return grads
    return grads._replace(loss=grads.loss.new_tensor(-1.5))


def run_logits(subject: Subject, example: Sharded, group: ProcessGroup) -> tuple[dict[str, Tensor], Tensor]:
    """Values, and the gradient of this rank's columns."""
    shard = shard_of(example.widths, dist.get_rank(group))
    drawn = batch(example.values, example.rows, sum(example.widths), example.dtype, example.options, subject.device)
    leaf = drawn.logits[..., shard.start : shard.stop].contiguous().requires_grad_()
    values = as_output(
        subject.loss(leaf, drawn.target, group=group, options=drawn.options, shard=shard, outputs=example.outputs)
    )
    backward(
        values, scalar_or_rows(used(drawn.grads, example.outputs, example.without_gradient), example.options.reduction)
    )
    return {name: value.cpu() for name, value in named(values).items()}, leaf.grad.cpu()


def judge_logits(subject: Subject, example: Sharded, results: list[Any]) -> None:
    """Of all ranks."""
    cpu = torch.device("cpu")
    drawn = batch(example.values, example.rows, sum(example.widths), example.dtype, example.options, cpu)
    grads = used(drawn.grads, example.outputs, example.without_gradient)
    reduction = example.options.reduction
    if reduction != "none":
        factor = torch.tensor(-1.5, dtype=torch.float64) / counted(drawn.target, drawn.options)
        grads = grads._replace(loss=factor.expand(drawn.target.shape))
    expected = Expected(drawn.logits, subject.allowed_ulps(example.dtype))
    truth = expected.add(drawn.target, drawn.options, grads)
    check_agreed(results)
    values = dict(results[0][0])
    if reduction != "none":
        check_reduced(values.pop("loss"), truth.loss, counted(drawn.target, drawn.options), 2e-5)
    check_values(values, values, truth, drawn.target, drawn.options)
    expected.check(torch.cat([grad for _, grad in results], -1))


def check_agreed(results: list[Any]) -> None:
    """Every rank's values have the bits of the first one's."""
    first = results[0][0]
    for values, _ in results:
        assert values.keys() == first.keys()
        for name, value in values.items():
            assert same_bits(value, first[name]), f"{name}: ranks disagree"


def run_fused(subject: Subject, example: FusedOverRanks, group: ProcessGroup) -> Any:
    """The loss, this rank's part of the gradients."""
    rank, layer = dist.get_rank(group), example.layer
    shard = shard_of(example.widths, rank)
    whole, weights = linear_fuzz.draw_inputs(layer, subject.device)
    mine = slice(shard.start, shard.stop)
    hidden = whole.hidden.chunk(group.size())[rank] if example.sequence_parallel and len(whole.hidden) else whole.hidden
    bias = None if whole.bias is None else whole.bias[mine]
    inputs = whole._replace(hidden=hidden, weight=whole.weight[mine], bias=bias).leaves()
    if bias is None:
        inputs = inputs._replace(bias=None)
    keywords: dict[str, Any] = {"keep": layer.keep, "outputs": layer.outputs, "group": group, "shard": shard}
    keywords["sequence_parallel"] = example.sequence_parallel
    if layer.weighted:
        keywords["token_weights"] = weights
    with linear_fuzz.cut(layer):
        values = as_output(linear.call(subject, inputs, **keywords))
        grads, _ = linear_fuzz.upstream(layer, whole, weights)
        with subject.serving():
            backward(values, grads)
    of_inputs = [None if each is None or each.grad is None else each.grad.cpu() for each in inputs[:3]]
    return {name: value.cpu() for name, value in named(values).items()}, of_inputs


def judge_fused(subject: Subject, example: FusedOverRanks, results: list[Any]) -> None:
    """Of all ranks: the loss has the same bits, and so has the gradient of hidden states that all hold."""
    layer = example.layer
    whole, weights = linear_fuzz.draw_inputs(layer, torch.device("cpu"))
    _, of_rows = linear_fuzz.upstream(layer, whole, weights)
    truth = linear.truth_of(whole, of_rows)
    check_agreed(results)
    values = dict(results[0][0])
    linear_fuzz.check_loss(layer, whole, values.pop("loss"), truth.rows.loss, weights)
    linear.check_values(whole, values, truth)
    of_hidden = [grads[0] for _, grads in results]
    if of_hidden[0] is None or linear_fuzz.overflows(truth, layer.dtype):
        return
    if not example.sequence_parallel:
        assert all(same_bits(each, of_hidden[0]) for each in of_hidden), "hidden: ranks disagree"
    hidden = torch.cat(of_hidden) if example.sequence_parallel else of_hidden[0]
    weight = torch.cat([grads[1] for _, grads in results])
    bias = None if whole.bias is None else torch.cat([grads[2] for _, grads in results])
    computed = linear_fuzz.error_of_g(whole, truth, of_rows, subject.allowed_ulps(layer.dtype))
    leaves = whole.leaves()
    for leaf, grad in zip(leaves[:3], (hidden, weight, bias), strict=True):
        if leaf is not None and grad is not None:
            leaf.grad = grad
    # Each rank's part of hidden's gradient is rounded before they are summed.
    computed["hidden"] *= 1 + len(results)
    linear_fuzz.check_gradients(subject, whole, leaves, truth, computed)


def main() -> None:
    """So many examples as the command line says, over the ranks that torchrun started."""
    from tests.conftest import make_subject

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    tally = Tally()
    group = dist.group.WORLD
    assert group is not None
    explore(make_subject("torch-cpu"), group, int(sys.argv[1]), tally, derandomize=False)
    if dist.get_rank() == 0:
        print(tally.text(f"ranks, {group.size()} of them"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
