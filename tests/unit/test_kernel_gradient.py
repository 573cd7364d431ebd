"""The gradient of every option and output by itself, from given statistics, against the twin in float64."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from te_ce import reference
from te_ce.outputs import OutputGrads
from te_ce.problem import ShardProblem
from te_ce.reference.rows import real_columns, split_scale, times_size, transform
from tests.support.bounds import unit_in_last_place
from tests.support.subject import Subject

IGNORED, BAD = 2, 3  # rows
PLAIN = ShardProblem(
    start=0, real_columns=90, classes=90, ignore_index=-100, smoothing_weight=0.0, outputs=("log_probs", "entropy")
)
SUBSETS = [subset for subset in itertools.product([False, True], repeat=4) if any(subset)]
ALL = (True, True, True, True)


@dataclasses.dataclass
class Drawn:
    """Inputs on the CPU: logits [.., columns], target [..], gradients and scale [..] or None."""

    problem: ShardProblem
    logits: Tensor
    target: Tensor
    grads: OutputGrads
    row_scale: Tensor | None


def draw(
    problem: ShardProblem = PLAIN,
    subset: tuple[bool, ...] = ALL,
    shape: tuple[int, ...] = (6,),
    dtype: torch.dtype = torch.float32,
    columns: int | None = None,
    row_scale: bool = False,
) -> Drawn:
    """Rows, of which one is ignored and one has a target that is no class."""
    random = torch.Generator().manual_seed(5)
    logits = 3.0 * torch.randn(*shape, columns or problem.real_columns, generator=random)
    target = torch.randint(problem.classes, shape, generator=random)
    # The first target is in this shard.
    target.view(-1)[0] = problem.start + problem.real_columns // 2
    target.view(-1)[IGNORED] = problem.ignore_index
    target.view(-1)[BAD] = problem.classes
    logits.view(-1, logits.shape[-1])[IGNORED] = torch.nan
    grads = [torch.randn(shape, generator=random) for _ in subset]
    scale = torch.empty(shape).uniform_(0.5, 2.0, generator=random) if row_scale else None
    given = OutputGrads(*(grad if wanted else None for grad, wanted in zip(grads, subset, strict=True)))
    return Drawn(problem, logits.to(dtype), target, given, scale)


def double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def saved_of(drawn: Drawn, logits: Tensor) -> Tensor:
    """What forward saves where this shard is the whole vocabulary, or half of one whose other half is alike."""
    problem = drawn.problem
    scale = drawn.row_scale if logits.dtype != torch.float64 else double(drawn.row_scale)
    stats = reference.row_statistics(logits, drawn.target, problem, scale)
    shards = 1 if problem.real_columns == problem.classes else 2
    return reference.merge_statistics(stats.repeat(shards, 1, 1), drawn.target, problem, scale)[1]


def truth(drawn: Drawn) -> tuple[Tensor, Tensor]:
    """The gradient in float64 and the error promised besides its rounding, [N, columns]."""
    problem, logits = drawn.problem, drawn.logits.double()
    grads = OutputGrads(*map(double, drawn.grads))
    saved = saved_of(drawn, logits)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    reference.logits_gradient(logits, drawn.target, grads, saved, grad, problem, double(drawn.row_scale))
    columns = logits.shape[-1]

    def of_row(tensor: Tensor | None) -> Tensor:
        return torch.zeros(1, 1) if tensor is None else tensor.double().reshape(-1, 1).abs()

    row_scale = None if drawn.row_scale is None else drawn.row_scale.double().reshape(-1)
    split = split_scale(problem, row_scale, logits.device)
    u, _ = transform(real_columns(logits, problem), problem, split)
    m, d, t = times_size(saved[0], split)[:, None], saved[1][:, None], saved[2][:, None]
    z = times_size(u.t(), split).t()
    g, g_lp, g_h, g_lse = map(of_row, drawn.grads)
    lse, entropy, from_max = m + d.log(), d.log() - t / d, z - m
    weight = g * (1 + (2 * problem.z_loss_weight * lse).abs()) + g_lp + g_lse
    # A probability of 0 times an infinite logarithm.
    weight = weight + g_h * (entropy.abs() + (from_max - d.log()).abs().clamp(max=1e4))
    relative = 2e-6 + 3e-7 * from_max.abs().clamp(max=1e4)
    scale = of_row(drawn.row_scale) if drawn.row_scale is not None else abs(problem.scale)
    if problem.softcap is not None:
        relative = relative + 4 * 2.0**-24 * scale * problem.softcap
    bound = relative * (from_max.exp() / d) * weight + 2e-6 * g * abs(problem.class_weight)
    y = drawn.target.reshape(-1, 1) - problem.start
    bound += 2e-6 * (g * abs(problem.target_weight) + g_lp) * (torch.arange(z.shape[1]) == y)
    bound = torch.nn.functional.pad(scale * bound, (0, columns - z.shape[1])).nan_to_num(0.0) + 2e-38
    return grad.reshape(-1, columns), bound


def check(subject: Subject, drawn: Drawn, out: Tensor | None = None, logits: Tensor | None = None) -> Tensor:
    """Run on these inputs; `out` and `logits`: where else the gradient and the logits are to lie."""
    device = subject.device
    expected, bound = truth(drawn)
    saved = saved_of(drawn, drawn.logits).to(device)
    x = drawn.logits.to(device) if logits is None else logits
    out = torch.full_like(x, 7.0) if out is None else out
    grads = OutputGrads(*(None if grad is None else grad.to(device) for grad in drawn.grads))
    scale = None if drawn.row_scale is None else drawn.row_scale.to(device)
    subject.backend.logits_gradient(x, drawn.target.to(device), grads, saved, out, drawn.problem, scale)
    got = out.cpu().double().reshape(expected.shape)
    assert torch.equal(got.isnan(), expected.isnan())
    assert got[BAD, : drawn.problem.real_columns].isnan().all()
    assert (got[IGNORED] == 0.0).all()
    assert (got[:, drawn.problem.real_columns :].nan_to_num() == 0.0).all()
    error, expected = (got - expected).nan_to_num(0.0).abs(), expected.nan_to_num(0.0)
    bound = bound + subject.allowed_ulps(out.dtype) * unit_in_last_place(expected, out.dtype)
    assert (error <= bound).all(), f"{(error / bound).max():.3g} times the bound at {int((error / bound).argmax())}"
    return out


def changed(**fields: Any) -> ShardProblem:
    return dataclasses.replace(PLAIN, **fields)


OPTIONS = {
    "plain": {},
    "uniform": {"smoothing_weight": 0.1},
    "others": {"smoothing_weight": 1.05},
    "z_loss": {"z_loss_weight": 0.01},
    "softcap": {"softcap": 4.0},
    "scale": {"scale": 1.7},
    "negative_scale": {"scale": -0.3},
    "softcap_scale": {"softcap": 4.0, "scale": -1.7},
    "z_loss_uniform": {"z_loss_weight": 0.01, "smoothing_weight": 0.1},
    "everything": {"z_loss_weight": 0.01, "smoothing_weight": 0.1, "softcap": 4.0, "scale": 1.7},
}


@pytest.mark.parametrize("subset", [(True, False, False, False), ALL], ids=["loss", "all"])
@pytest.mark.parametrize("fields", OPTIONS.values(), ids=OPTIONS)
def test_options(subject: Subject, fields: dict[str, Any], subset: tuple[bool, ...]) -> None:
    check(subject, draw(changed(**fields), subset))


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda subset: "".join("01"[given] for given in subset))
def test_subsets_of_the_gradients(subject: Subject, subset: tuple[bool, ...]) -> None:
    problem = changed(smoothing_weight=0.1, z_loss_weight=0.01)
    check(subject, draw(problem, subset))
    check(subject, draw(problem, subset, row_scale=True))


@pytest.mark.parametrize("fields", OPTIONS.values(), ids=OPTIONS)
def test_a_scale_of_each_row(subject: Subject, fields: dict[str, Any]) -> None:
    check(subject, draw(changed(**{**fields, "scale": 1.0}), row_scale=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# A multiple of a vector; columns before and after the whole vectors; fewer than a vector; one; two tiles of 4 KiB.
@pytest.mark.parametrize("columns", [96, 91, 5, 1, 2100])
def test_widths_and_dtypes(subject: Subject, columns: int, dtype: torch.dtype) -> None:
    for fields in ({}, {"smoothing_weight": 0.1, "softcap": 4.0, "scale": 1.7}):
        check(subject, draw(changed(real_columns=columns, classes=columns, **fields), dtype=dtype))


@pytest.mark.parametrize("fields", OPTIONS.values(), ids=OPTIONS)
def test_a_padded_shard_that_is_not_the_first(subject: Subject, fields: dict[str, Any]) -> None:
    drawn = draw(changed(start=90, classes=180, **fields), columns=99)
    # What padding holds is nobody's business.
    drawn.logits[:, 90:] = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(3)
    check(subject, drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place(subject: Subject, dtype: torch.dtype) -> None:
    drawn = draw(changed(smoothing_weight=0.1, softcap=4.0), dtype=dtype)
    logits = drawn.logits.to(subject.device, copy=True)
    check(subject, drawn, out=logits, logits=logits)


def test_columns_that_are_masked(subject: Subject) -> None:
    # Their probability is 0, and so is its product with their infinite logarithm.
    drawn = draw(PLAIN)
    drawn.logits[:, ::3] = -torch.inf
    drawn.target[0], drawn.target[1] = 1, 3
    out = check(subject, drawn)
    assert (out[0, ::3] == 0.0).all()
    assert out[0].isfinite().all()
    # A softcap makes them finite, with a gradient of 0 all the same.
    out = check(subject, dataclasses.replace(drawn, problem=changed(softcap=4.0)))
    assert (out[0, ::3] == 0.0).all()


@pytest.mark.parametrize("subset", [(True, False, False, False), ALL], ids=["loss", "all"])
def test_rows_that_have_no_probabilities(subject: Subject, subset: tuple[bool, ...]) -> None:
    drawn = draw(PLAIN, subset)
    drawn.logits[0] = -torch.inf
    drawn.logits[1, 7] = torch.nan
    drawn.logits[4, 7] = torch.inf
    assert check(subject, drawn)[[0, 1, 4]].isnan().all()


LAYOUTS = {
    "expanded": lambda grad: grad[:1, :1].expand(grad.shape),
    "expanded_inside": lambda grad: grad[:, :1].expand(grad.shape),
    "transposed": lambda grad: grad.t().contiguous().t(),
    "every_other": lambda grad: grad.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", range(5))
def test_strides_of_each_gradient_and_of_the_scale(subject: Subject, which: int, layout: str) -> None:
    drawn = draw(changed(smoothing_weight=0.1), shape=(3, 4), row_scale=True)
    parts = [*drawn.grads, drawn.row_scale]
    parts[which] = LAYOUTS[layout](parts[which])
    check(subject, dataclasses.replace(drawn, grads=OutputGrads(*parts[:4]), row_scale=parts[4]))


def test_rows_that_do_not_fold(subject: Subject) -> None:
    # Each tensor steps through three dimensions in an order of its own: a launch for each index of the first.
    drawn = draw(changed(smoothing_weight=0.1, z_loss_weight=0.01), shape=(2, 3, 2), row_scale=True)
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0)]
    parts = [
        part.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())
        for part, order in zip([*drawn.grads, drawn.row_scale], orders, strict=True)
        if part is not None
    ]
    drawn = dataclasses.replace(drawn, grads=OutputGrads(*parts[:4]), row_scale=parts[4])
    logits = drawn.logits.transpose(0, 2).contiguous().transpose(0, 2).to(subject.device)
    check(subject, drawn, logits=logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_wherever_a_shard_begins(subject: Subject, dtype: torch.dtype) -> None:
    # Tiles, vectors and edges lie elsewhere in a row that is cut in another way.
    fields = {"smoothing_weight": 0.1, "softcap": 4.0, "scale": 1.7}
    drawn = draw(changed(real_columns=1100, classes=1100, **fields), dtype=dtype)
    whole, saved = check(subject, drawn).cpu(), saved_of(drawn, drawn.logits)
    device = subject.device
    for start, stop in ((0, 512), (512, 1100), (7, 1100), (3, 9)):
        problem = dataclasses.replace(drawn.problem, start=start, real_columns=stop - start)
        part = drawn.logits[:, start:stop].contiguous()
        grads = OutputGrads(*(None if grad is None else grad.to(device) for grad in drawn.grads))
        out = torch.empty_like(part, device=device)
        subject.backend.logits_gradient(part.to(device), drawn.target.to(device), grads, saved.to(device), out, problem)
        torch.testing.assert_close(out.cpu(), whole[:, start:stop], rtol=0, atol=0, equal_nan=True)
