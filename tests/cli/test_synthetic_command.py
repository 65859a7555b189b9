"""``tl-posdisent synthetic`` trains what it is told, writes the library's tables, and says errors in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from tl_posdisent.cli import app
from tl_posdisent.synthetic import Preset, deposit_study, preset
from tl_posdisent.synthetic.training import presets


def brief(name: str = "small") -> Preset:
    """Two steps of the small one."""
    small = preset("small")
    return replace(small, training=replace(small.training, n_train=64, batch_size=32, n_test=60))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "SMALL", brief())


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["synthetic", *map(str, arguments)], env={"COLUMNS": "140", "NO_COLOR": "1"})


@pytest.mark.slow
def test_the_tables_are_those_of_the_library(tmp_path: Path) -> None:
    out = tmp_path / "new" / "tables"
    chosen = ("--encoding", "rope", "--encoding", "none", "--task", "count", "--seeds", 2)
    result = invoke(*chosen, "--out", out, "--no-progress")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert str(out) not in result.stdout
    study = deposit_study(brief(), encodings=["rope", "none"], tasks=["count"], seeds=[0, 1], progress=False)
    timed = ["seconds"]
    accuracy = pd.read_csv(out / "accuracy.csv").drop(columns=timed)
    pd.testing.assert_frame_equal(accuracy, study.accuracy.drop(columns=timed))
    pd.testing.assert_frame_equal(pd.read_csv(out / "drops.csv"), study.drops)
    pd.testing.assert_frame_equal(pd.read_csv(out / "deposit.csv"), study.deposits(), check_dtype=False)
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["count"]]
    for row, (_, expected) in zip(rows, study.summary().iterrows(), strict=True):
        spread = [f"{expected['accuracy']:.2f}", "±", f"{expected['accuracy_std']:.2f}"]
        assert row[1:6] == [expected["encoding"], f"{expected['chance']:.3f}", *spread]
        assert f"{expected['drop']:.2f}" == row[6]
        assert row[-2:] == expected["layers"].split()
    page = (out / "heads.html").read_text(encoding="utf-8")
    assert [f"{encoding}, count: accuracy lost" in page for encoding in ("rope", "none", "alibi")] == [
        True,
        True,
        False,
    ]
    assert "cdn.plot.ly/plotly" not in page


def test_without_options_it_is_the_whole_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def stop(preset: Preset, **options: Any) -> None:
        asked.update(options, preset=preset.name)
        raise ValueError("enough")

    monkeypatch.setattr("tl_posdisent.synthetic.analysis.deposit_study.deposit_study", stop)
    monkeypatch.chdir(tmp_path)
    assert invoke().exit_code == 2
    assert asked["preset"] == "small"
    assert (asked["encodings"], asked["tasks"], list(asked["seeds"]), asked["device"]) == (None, None, [0], "cpu")
    assert asked["folder"] == Path("out/synthetic")
    assert "rotary_heads" not in asked
    invoke("--preset", "paper", "--rotary-heads", "2", "--device", "cpu:0", "--seeds", "2", "--seed", "7")
    assert (asked["preset"], asked["rotary_heads"], asked["device"]) == ("paper", 2, "cpu:0")
    assert list(asked["seeds"]) == [7, 8]


def test_a_second_call_takes_up_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("--encoding", "none", "--task", "count", "--out", tmp_path, "--no-progress")
    first = invoke(*chosen)
    monkeypatch.setattr(
        "tl_posdisent.synthetic.training.loop.TrainingLoop._step", lambda self: pytest.fail("trained again")
    )
    assert invoke(*chosen).stdout == first.stdout


def test_progress_goes_to_stderr(tmp_path: Path) -> None:
    result = invoke("--encoding", "none", "--task", "count", "--out", tmp_path)
    assert "training" in result.stderr
    assert "training" not in result.stdout


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--encoding", "rotary"], "--encoding must be 'none', "),
        (["--task", "sum"], "--task must be 'distance' or 'count', got 'sum'"),
        (["--encoding", "none", "--rotary-heads", "1"], "--rotary-heads must be left out with encoding='none'"),
        (
            ["--encoding", "rope", "--rotary-heads", "5"],
            "--rotary-heads must be an integer from 0 to 4 (n_heads), got 5",
        ),
        (["--encoding", "none", "--device", "abacus"], "--device must be one that torch can use here, got 'abacus'"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = invoke(*arguments, "--out", tmp_path / "out", "--no-progress")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    result = invoke("--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "--out must be a folder" in result.stderr
    assert (tmp_path / "out").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--preset", "large"], ["--dtype", "float32"]])
def test_options_out_of_range(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert result.stdout == ""
