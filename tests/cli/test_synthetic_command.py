"""``tl-posdisent synthetic`` trains what it is told, and writes the library's tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.command_line import run_command

from tl_posdisent.synthetic import Preset, deposit, head_drops, preset, train_preset
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
    chosen = ("--encoding", "rope", "--encoding", "none", "--task", "count", "--seeds", "0-1")
    result = run_command("synthetic --no-progress", *chosen, "--out", out)
    assert result.stderr == ""
    assert str(out) not in result.stdout
    runs = train_preset(brief(), encodings=["rope", "none"], tasks=["count"], seeds=[0, 1], progress=False)
    drops, found = (pd.read_csv(out / f"{name}.csv").set_index(["encoding", "seed"]) for name in ("drops", "deposit"))
    for (encoding, _, seed), run in runs.items():
        split = run.split()
        expected = head_drops(run.model, split.test_tokens, split.test_labels, progress=False)
        own = drops.loc[(encoding, seed)].drop(columns="task").reset_index(drop=True)
        pd.testing.assert_frame_equal(own, expected)
        row, report = found.loc[(encoding, seed)], deposit(expected)
        assert row[["task", "accuracy", "loss"]].tolist() == ["count", run.test_accuracy, run.test_loss]
        assert row[["drop", "share", "layer"]].tolist() == [report.drop, report.share, report.layer]
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["count"]]
    for row, encoding in zip(rows, ("rope", "none"), strict=True):
        both = found.loc[encoding]
        spread = [f"{both['accuracy'].mean():.2f}", "±", f"{both['accuracy'].std():.2f}"]
        assert row[1:6] == [encoding, f"{1 / 17:.3f}", *spread]
        assert f"{both['drop'].mean():.2f}" == row[6]
        assert row[-2:] == [str(layer) for layer in both["layer"]]


def test_without_options_it_is_the_whole_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def stop(preset: Preset, **options: Any) -> None:
        asked.update(options, preset=preset.name)
        raise ValueError("enough")

    monkeypatch.setattr(presets, "train_preset", stop)
    monkeypatch.chdir(tmp_path)
    run_command("synthetic", code=2)
    assert asked["preset"] == "small"
    assert (asked["encodings"], asked["tasks"], list(asked["seeds"]), asked["device"]) == (None, None, [0], "cpu")
    assert asked["folder"] == Path("out/synthetic/trainings")
    assert "rotary_heads" not in asked
    run_command("synthetic --preset paper --rotary-heads 2 --device cpu:0 --seeds 7,8", code=2)
    assert (asked["preset"], asked["rotary_heads"], asked["device"]) == ("paper", 2, "cpu:0")
    assert list(asked["seeds"]) == [7, 8]


def test_a_second_call_takes_up_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"synthetic --encoding none --task count --no-progress --out {tmp_path}"
    first = run_command(line)
    monkeypatch.setattr(
        "tl_posdisent.synthetic.training.loop.TrainingLoop._step", lambda self: pytest.fail("trained again")
    )
    assert run_command(line).stdout == first.stdout
