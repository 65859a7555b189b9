"""``tl-posdisent sweep``: additivity over a training as one command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from train_demo_model import save_weights
from typer.testing import CliRunner, Result

from tl_posdisent.cli import app
from tl_posdisent.demo.demo_model import demo_hf_model
from tl_posdisent.sweeps import Text, jobs, sweep


def invoke(line: str, *more: Any) -> Result:
    words = [*shlex.split(line), "--no-progress", *map(str, more)]
    return CliRunner().invoke(app, ["sweep", *words], env={"COLUMNS": "120", "NO_COLOR": "1"})


@pytest.mark.slow
def test_additivity_over_a_training(tmp_path: Path) -> None:
    training, out = tmp_path / "training", tmp_path / "out"
    training.mkdir()
    for step, trained in ((0, False), (4000, True)):
        save_weights(demo_hf_model(trained=trained), training / f"step-{step:06d}.safetensors")
    line = f"--model {training} --checkpoints all --length 32 --texts 2 --split 2 --out {out}"
    result = invoke(line, "--table", tmp_path / "table.csv")
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "table.csv")
    texts = Text.of("demo", length=32, count=2).split(2)
    mine = sweep(jobs(training, "additivity", texts, checkpoints="all"), out=out, progress=False)  # found there
    assert table["r"].tolist() == pytest.approx(mine["r"].tolist(), abs=1e-12)
    means = mine.groupby("step")["r"].mean()
    shown = {words[1]: words[3] for words in map(str.split, result.stdout.splitlines()) if words[:1] == ["training"]}
    assert shown == {str(step): f"{r:.3f}" for step, r in means.items()}
    assert means[4000] != means[0]


def test_arguments_and_seeds_reach_the_experiment(tmp_path: Path) -> None:
    line = "--length 32 --experiment perturbation_curve --seeds 3-4 --argument fractions=[0.5] --argument unit=word"
    result = invoke(line, "--out", tmp_path / "out", "--table", tmp_path / "t.csv", "--argument", 'kinds=["order"]')
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "t.csv")
    assert table["seed"].unique().tolist() == [3, 4]
    assert table["fraction"].unique().tolist() == [0.5]
    assert table["kind"].unique().tolist() == ["order"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--experiment additivty", "experiment must be one of"),
        ("--argument layers", "--argument must be NAME=JSON"),
        ("--argument layer=3", "arguments of additivity must be its own"),
        ("--checkpoints 1-x", "--checkpoints must be numbers with commas"),
        ("--model ./nowhere", "model must be a name, or a file or folder that exists, got nowhere"),
        ("--table table.xlsx", "--table must end in .csv"),
        ("--length 4000", "all 1 jobs failed"),
    ],
)
def test_mistakes_are_said_in_a_line(line: str, message: str, tmp_path: Path) -> None:
    result = invoke(line, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
