"""``tl-posdisent synthetic`` trains what it is told, and writes the library's tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.command_line import run_command

from tl_posdisent.synthetic import Preset, deposit_study, preset
from tl_posdisent.synthetic.training import presets


def brief(name: str = "small") -> Preset:
    """Two steps of the small one."""
    small = preset("small")
    return replace(small, training=replace(small.training, n_train=64, batch_size=32, n_test=60))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "SMALL", brief())


@pytest.mark.slow
def test_the_tables_are_those_of_the_library(tmp_path: Path) -> None:
    out = tmp_path / "new" / "tables"
    chosen = ("--encoding", "rope", "--encoding", "none", "--task", "count", "--seeds", 2)
    result = run_command("synthetic --no-progress", *chosen, "--out", out)
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
    run_command("synthetic", code=2)
    assert asked["preset"] == "small"
    assert (asked["encodings"], asked["tasks"], list(asked["seeds"]), asked["device"]) == (None, None, [0], "cpu")
    assert asked["folder"] == Path("out/synthetic")
    assert "rotary_heads" not in asked
    run_command("synthetic --preset paper --rotary-heads 2 --device cpu:0 --seeds 2 --seed 7", code=2)
    assert (asked["preset"], asked["rotary_heads"], asked["device"]) == ("paper", 2, "cpu:0")
    assert list(asked["seeds"]) == [7, 8]


def test_a_second_call_takes_up_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"synthetic --encoding none --task count --no-progress --out {tmp_path}"
    first = run_command(line)
    monkeypatch.setattr(
        "tl_posdisent.synthetic.training.loop.TrainingLoop._step", lambda self: pytest.fail("trained again")
    )
    assert run_command(line).stdout == first.stdout


def test_progress_goes_to_stderr(tmp_path: Path) -> None:
    result = run_command("synthetic --encoding none --task count --out", tmp_path)
    assert "training" in result.stderr
    assert "training" not in result.stdout
