"""The forward kernels against the twin in float64: every option and output, shards, parts, blocks, dtypes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from te_ce import LossOptions, reference
from te_ce.outputs import OUTPUTS
from tests.support.forward import UNIT, check, draw, problems, run, z_error_of
from tests.support.subject import Subject

_SINGLE = {
    "plain": LossOptions(),
    "uniform": LossOptions(label_smoothing=0.1),
    "z_loss": LossOptions(z_loss_weight=0.01),
    "softcap": LossOptions(softcap=5.0),
    "scale": LossOptions(scale=0.7),
    "negative_scale": LossOptions(scale=-1.3),
    "padding": LossOptions(vocab_size=90),
}
_PAIRS = {
    "others_softcap_scale": LossOptions(label_smoothing=0.1, smoothing="others", softcap=5.0, scale=-0.7),
    "uniform_z_loss_padding": LossOptions(label_smoothing=0.1, z_loss_weight=0.01, vocab_size=90),
    "softcap_padding": LossOptions(softcap=1.0, vocab_size=67),
    "negative_scale_padding": LossOptions(scale=-2.0, vocab_size=67),
}
_ALL = {**_SINGLE, **_PAIRS}


@pytest.mark.parametrize("widths", [None, (50, 7, 0, 39)], ids=str)
@pytest.mark.parametrize("name", _ALL)
def test_options_with_every_output(subject: Subject, name: str, widths: tuple[int, ...] | None) -> None:
    options = _ALL[name]
    logits, target = draw(96)
    got = run(subject.backend, logits.to(subject.device), target.to(subject.device), options, widths, OUTPUTS)
    truth = run(reference, logits.double(), target, options, None, OUTPUTS)
    check(got, truth, z_error_of(options))


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("widths", [None, (48, 48)], ids=str)
def test_an_output_alone(subject: Subject, output: str, widths: tuple[int, ...] | None) -> None:
    options = LossOptions(z_loss_weight=0.0 if output == "lse" else 0.1)
    logits, target = draw(96)
    got = run(subject.backend, logits.to(subject.device), target.to(subject.device), options, widths, (output,))
    check(got, run(reference, logits.double(), target, options, None, (output,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 129, 2051, 4500])
@pytest.mark.parametrize("options", [_SINGLE["plain"], _PAIRS["others_softcap_scale"]], ids=["plain", "all"])
def test_widths_and_dtypes(subject: Subject, dtype: torch.dtype, columns: int, options: LossOptions) -> None:
    if columns == 1:
        options = dataclasses.replace(options, label_smoothing=0.0)
    logits, target = draw(columns, (3,), dtype)
    got = run(subject.backend, logits.to(subject.device), target.to(subject.device), options, None, OUTPUTS)
    truth = run(reference, logits.double(), target, options, None, OUTPUTS)
    check(got, truth, z_error_of(options))


def test_a_scale_for_every_row(subject: Subject) -> None:
    logits, target = draw(96, (2, 3))
    logits, target = logits.to(subject.device), target.to(subject.device)
    scale = torch.linspace(-2.0, 2.5, 6, device=subject.device)
    for row_scale in (scale.view(2, 3), scale.view(3, 2).t(), scale[:3].expand(2, 3)):
        for options in (LossOptions(), LossOptions(softcap=5.0, label_smoothing=0.1)):
            for widths in (None, (40, 56)):
                got = run(subject.backend, logits, target, options, widths, OUTPUTS, row_scale)
                truth = run(reference, logits.double().cpu(), target.cpu(), options, None, OUTPUTS, row_scale.cpu())
                check(got, truth, z_error_of(options, row_scale))


def test_rows_that_do_not_fold(subject: Subject) -> None:
    logits, target = draw(40, (2, 3, 2))
    logits, target = logits.permute(2, 1, 0, 3).to(subject.device), target.permute(2, 1, 0).to(subject.device)
    row_scale = torch.rand(3, 2, 2, device=subject.device).permute(1, 0, 2) + 0.5
    for scale in (None, row_scale):
        for widths in (None, (24, 16)):
            got = run(subject.backend, logits, target, LossOptions(), widths, OUTPUTS, scale)
            on_cpu = None if scale is None else scale.cpu()
            truth = run(reference, logits.double().cpu(), target.cpu(), LossOptions(), None, OUTPUTS, on_cpu)
            check(got, truth, z_error_of(LossOptions(), scale))


def test_parts_of_rows(subject: Subject) -> None:
    logits, target = draw(7001, (3,))
    options = LossOptions(label_smoothing=0.1, z_loss_weight=0.01)
    truth = run(reference, logits.double(), target, options, None, OUTPUTS)
    with subject.reading_in_parts_of(2000):
        for widths in (None, (5001, 0, 2000)):
            got = run(subject.backend, logits.to(subject.device), target.to(subject.device), options, widths, OUTPUTS)
            check(got, truth)


def _amid(rows: int, columns: int, offset: int, dtype: torch.dtype) -> Tensor:
    """Rows that begin anywhere in a vector of 16 bytes, NaN between them."""
    storage = torch.full((offset + rows * (columns + 3) + 16,), torch.nan, dtype=dtype)
    view = storage[offset:].as_strided((rows, columns), (columns + 3, 1))
    return view.copy_(draw(columns, (rows,), dtype)[0])


@pytest.mark.parametrize(("dtype", "offset"), [(torch.bfloat16, 3), (torch.float16, 5), (torch.float32, 1)], ids=str)
@pytest.mark.parametrize("columns", [2, 15, 300, 2051])
def test_rows_anywhere_in_a_vector(subject: Subject, dtype: torch.dtype, offset: int, columns: int) -> None:
    logits = _amid(4, columns, offset, dtype)
    target = torch.tensor([0, columns - 1, -100, columns // 2])
    # The max in the head, the body and the tail of a row, and equal to one after it.
    for row, column in enumerate((0, columns - 1, columns // 2, 1)):
        logits[row, column] = 20.0
        logits[row, -1] = 20.0
    storage = logits.as_strided((logits.storage_offset() + 4 * (columns + 3),), (1,), 0).to(subject.device)
    moved = storage.as_strided(logits.shape, logits.stride(), logits.storage_offset())
    for options in (LossOptions(label_smoothing=0.1), LossOptions(softcap=30.0, reproducible_tp=True)):
        got = run(subject.backend, moved, target.to(subject.device), options, None, OUTPUTS)
        truth = run(reference, logits.double(), target, options, None, OUTPUTS)
        check(got, truth, z_error_of(options))


def test_columns_of_minus_infinity(subject: Subject) -> None:
    inf = torch.inf
    logits = torch.full((5, 4200), -inf)
    logits[0, 4100:4104] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    logits[1, :4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    logits[2, 2000] = 7.0
    logits[4, 5] = 3.0
    target = torch.tensor([4102, 2, 2000, 17, 17])
    for options in (LossOptions(), LossOptions(reproducible_tp=True)):
        for widths in (None, (4096, 104)):
            got = run(subject.backend, logits.to(subject.device), target.to(subject.device), options, widths, OUTPUTS)
            check(got, run(reference, logits.double(), target, options, None, OUTPUTS))
            assert got.loss[3].isnan()
            assert got.outputs["predictions"][3] == 0


def test_infinite_logits_under_a_softcap(subject: Subject) -> None:
    logits, target = draw(96)
    logits[..., 5], logits[..., 7] = torch.inf, -torch.inf
    options = LossOptions(softcap=4.0, scale=1.5)
    got = run(subject.backend, logits.to(subject.device), target.to(subject.device), options, None, OUTPUTS)
    truth = run(reference, logits.double(), target, options, None, OUTPUTS)
    check(got, truth, 4 * UNIT * 6.0)
    # Before the scale.
    assert (got.saved[0] == 4.0).all()


def test_nan_stays_in_its_row(subject: Subject) -> None:
    logits, target = draw(96)
    logits[0, 0, 40] = torch.nan
    for options in (LossOptions(), LossOptions(softcap=4.0), LossOptions(reproducible_tp=True)):
        got = run(subject.backend, logits.to(subject.device), target.to(subject.device), options, None, OUTPUTS[:4])
        truth = run(reference, logits.double(), target, options, None, OUTPUTS[:4])
        assert truth.outputs["entropy"][0, 0].isnan()
        check(got, truth, z_error_of(options))


def test_equal_maxima_give_the_first_of_them(subject: Subject) -> None:
    logits = torch.zeros(4, 9000)
    target = torch.tensor([0, 1, -100, 3])
    for row, columns in enumerate(([8990, 4200], [17, 16, 8999], [4096, 4095], [])):
        logits[row, columns] = 2.0
    for options in (LossOptions(), LossOptions(reproducible_tp=True), LossOptions(scale=-1.0)):
        for widths in (None, (4096, 4904)):
            got = run(
                subject.backend, logits.to(subject.device), target.to(subject.device), options, widths, ("predictions",)
            )
            first = [0, 0, 0, 0] if options.scale == -1.0 else [4200, 16, 4095, 0]
            assert got.outputs["predictions"].tolist() == first


def test_a_confident_row_keeps_its_small_terms(subject: Subject) -> None:
    logits = torch.full((2, 20000), -16.0)
    logits[0, 9000] = 0.0
    logits[1, ::40] = 0.0
    target = torch.tensor([9000, 0])
    for options in (LossOptions(), LossOptions(reproducible_tp=True)):
        for widths in (None, (8192, 11808)):
            got = run(subject.backend, logits.to(subject.device), target.to(subject.device), options, widths, OUTPUTS)
            check(got, run(reference, logits.double(), target, options, None, OUTPUTS))


def test_many_blocks_do_not_round_a_sum_to_one_side(subject: Subject) -> None:
    blocks = 40
    (problem,) = problems(LossOptions(reproducible_tp=True), (4096 * blocks,), ())
    gathered = torch.empty(blocks, problem.fields, 2)
    # Beside the 1 of the first block, every other one is a little more than half a unit in the last place.
    small = torch.tensor(0.55 * 2**-23).log()
    gathered[:, 0], gathered[:, 1], gathered[:, 2] = small, 1.0, -torch.inf
    gathered[0, 0], gathered[0, 2] = 0.0, 0.0
    # A block without columns, between two others.
    empty = torch.tensor([-torch.inf, 0.0, -torch.inf])[None, :, None].expand(3, 3, 2)
    with_empty = torch.cat([gathered[:9], empty, gathered[9:]])
    target = torch.tensor([5, 6], device=subject.device)
    loss, saved, _ = subject.backend.merge_statistics(gathered.to(subject.device), target, problem)
    again, saved_again, _ = subject.backend.merge_statistics(with_empty.to(subject.device), target, problem)
    assert torch.equal(loss, again)
    assert torch.equal(saved, saved_again)
    if subject.backend.name == "triton":
        assert (loss.double() - torch.log1p((blocks - 1) * small.double().exp())).abs().max() < 1e-7


def test_rows_of_nan_predict_a_column(subject: Subject) -> None:
    logits = torch.full((2, 4200), torch.nan, device=subject.device)
    target = torch.tensor([3, 4], device=subject.device)
    for options in (LossOptions(), LossOptions(reproducible_tp=True), LossOptions(softcap=3.0)):
        for widths in (None, (4096, 104)):
            got = run(subject.backend, logits, target, options, widths, ("predictions",))
            # Which one, is up to what a maximum makes of NaN on the device.
            assert all(0 <= column < 4200 for column in got.outputs["predictions"].tolist())
            assert got.loss.isnan().all()


@pytest.mark.parametrize("name", _SINGLE)
def test_options_that_are_off_change_no_bit(subject: Subject, name: str) -> None:
    options = _SINGLE[name]
    logits, target = draw(4500, (3,))
    logits, target = logits.to(subject.device), target.to(subject.device)
    plain = run(subject.backend, logits, target, options)
    with_outputs = run(subject.backend, logits, target, options, None, ("log_probs", "lse", "z_loss"))
    assert torch.equal(plain.loss.nan_to_num(7.0), with_outputs.loss.nan_to_num(7.0))
    assert torch.equal(plain.saved, with_outputs.saved)


@pytest.mark.parametrize(
    ("dtype", "option"),
    [
        (torch.bfloat16, "plain"),
        (torch.bfloat16, "uniform"),
        (torch.bfloat16, "softcap"),
        (torch.float32, "uniform"),
        (torch.float16, "plain"),
    ],
    ids=str,
)
def test_blocks_have_the_same_bits_however_the_vocabulary_is_cut(
    subject: Subject, dtype: torch.dtype, option: str
) -> None:
    columns = 16385 if dtype == torch.bfloat16 else 9001
    options = dataclasses.replace(_SINGLE[option], reproducible_tp=True)
    logits, target = draw(columns, (3,), dtype)
    logits, target = logits.to(subject.device), target.to(subject.device)
    target[0] = columns - 1
    whole = run(subject.backend, logits, target, options, None, OUTPUTS)
    cuts = [(columns,), (4096, columns - 4096), (8192, 0, columns - 8192)]
    for widths in cuts:
        cut = run(subject.backend, logits, target, options, widths, OUTPUTS)
        copied = run(subject.backend, logits.clone()[1:], target[1:], options, widths, OUTPUTS)
        for other, rows in ((cut, slice(None)), (copied, slice(1, None))):
            assert torch.equal(whole.saved[:, rows], other.saved)
            assert torch.equal(whole.loss[rows].nan_to_num(7.0), other.loss.nan_to_num(7.0))
            for name in OUTPUTS:
                assert torch.equal(whole.outputs[name][rows].nan_to_num(7.0), other.outputs[name].nan_to_num(7.0)), name
    check(whole, run(reference, logits.double().cpu(), target.cpu(), options, None, OUTPUTS), 4 * UNIT * 5.0)
