"""What a run leaves behind: a CSV with every step's loss, a picture, a verdict."""

import csv
from pathlib import Path

import pytest
from gpt import report
from gpt.config import Config
from gpt.train import History


def history(name: str, losses: list[float], held_out: float) -> History:
    return History(name, losses, [(len(losses), held_out)])


@pytest.fixture
def recorder(tmp_path: Path) -> report.Recorder:
    recorder = report.Recorder(tmp_path / "out", active=True)
    yield recorder
    recorder.close()


def test_csv_holds_every_step(recorder: report.Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    recorder.begin("te_ce", 3)
    for _ in range(3):
        recorder.advance()
    recorder.log(2, [5.0, 4.0], [None, 0.5], 1234.6, 99.96, 1e-3)
    recorder.held_out(2, 4.5)
    recorder.log(3, [3.0], [0.25], 1000.0, 100.0, 1e-4)
    recorder.end()
    rows = list(csv.DictReader((recorder.folder / "metrics.csv").read_text().splitlines()))
    losses = [(row["step"], row["train_loss"]) for row in rows if row["train_loss"]]
    assert losses == [("1", "5"), ("2", "4"), ("3", "3")]
    assert [row["gradient_norm"] for row in rows if row["train_loss"]] == ["", "0.5", "0.25"]
    assert [(row["step"], row["held_out_loss"]) for row in rows if row["held_out_loss"]] == [("2", "4.5")]
    assert [(row["tokens_per_second"], row["peak_memory_mib"]) for row in rows if row["tokens_per_second"]] == [
        ("1235", "100.0"),
        ("1000", "100.0"),
    ]
    assert {row["run"] for row in rows} == {"te_ce"}
    shown = capsys.readouterr().out
    assert "step    2/3  loss  4.0000" in shown
    assert "1,235 tokens/s" in shown
    assert "held-out loss 4.5000" in shown


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = report.Recorder(tmp_path / "out", active=False)
    silent.begin("te_ce", 1)
    silent.advance()
    silent.log(1, [5.0], [None], 1.0, 1.0, 1.0)
    silent.held_out(1, 5.0)
    silent.end()
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("held_out", "asked", "code"),
    [
        (5.0, 1.0, 0),
        (5.5, 1.0, 1),
        (5.5, None, 0),
        (5.0, 1.5, 1),
        (float("nan"), 1.0, 1),
        (6.5, 0.0, 1),
        (float("inf"), 1.0, 1),
    ],
)
def test_exit_code_says_whether_the_claim_holds(
    recorder: report.Recorder,
    capsys: pytest.CaptureFixture[str],
    held_out: float,
    asked: float | None,
    code: int,
) -> None:
    config = Config()
    config.check.below_unigram = asked
    assert report.conclude(config, [history("te_ce", [6.0, 5.0], held_out)], 6.25, recorder) == code
    told = capsys.readouterr()
    assert f"held-out loss {held_out:.4f} is " in told.out
    assert "the unigram entropy 6.2500" in told.out
    assert told.err.count("\n") == code
    assert ("check.below_unigram: expected at least" in told.err) == bool(code)
    assert (recorder.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_comparison_states_the_largest_differences() -> None:
    runs = [
        history("te_ce", [6.0, 5.0, 4.0], 4.0),
        history("native", [6.0, 5.25, 4.125], 4.0),
        history("native again", [6.0, 5.25, 4.0625], 4.0),
    ]
    told = report.comparison(runs)
    assert "over 3 steps: te_ce and native 2.50e-01, native twice from the same seed 6.25e-02" in told


def test_comparison_refuses_curves_of_unequal_length() -> None:
    with pytest.raises(ValueError, match="longer"):
        report.differences(history("a", [1.0], 1.0), history("b", [1.0, 2.0], 1.0))


def test_picture_of_a_comparison_has_both_panels(tmp_path: Path) -> None:
    import matplotlib.image

    one = [history("te_ce", [6.0, 5.0], 5.0)]
    three = [*one, history("native", [6.0, 5.0], 5.0), history("native again", [6.0, 5.0], 5.0)]
    heights = []
    for runs in (one, three):
        report.plot(runs, 6.0, "note", tmp_path / "loss.png")
        heights.append(matplotlib.image.imread(tmp_path / "loss.png").shape[0])
    assert heights[1] > heights[0]
