"""``tl-posdisent sweep``: additivity over a training as one command."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from support.command_line import run_command
from train_demo_model import save_weights

from tl_posdisent import additivity, load_demo_model
from tl_posdisent.demo.demo_model import demo_hf_model
from tl_posdisent.sweeps import Text, jobs, sweep


@pytest.mark.slow
def test_additivity_over_a_training(tmp_path: Path) -> None:
    training, out = tmp_path / "training", tmp_path / "out"
    training.mkdir()
    for step, trained in ((0, False), (4000, True)):
        save_weights(demo_hf_model(trained=trained), training / f"step-{step:06d}.safetensors")
    line = f"sweep --no-progress --model {training} --checkpoints all --length 32 --texts 2 --split 2 --out {out}"
    result = run_command(line, "--table", tmp_path / "table.csv")
    table = pd.read_csv(tmp_path / "table.csv")
    texts = Text.of("demo", length=32, count=2).split(2)
    mine = sweep(jobs(training, "additivity", texts, checkpoints="all"), out=out, progress=False)  # found there
    assert table["r"].tolist() == pytest.approx(mine["r"].tolist(), abs=1e-12)
    means = mine.groupby("step")["r"].mean()
    shown = {words[1]: words[3] for words in map(str.split, result.stdout.splitlines()) if words[:1] == ["training"]}
    assert shown == {str(step): f"{r:.4g}" for step, r in means.items()}
    assert means[4000] != means[0]
    model = load_demo_model()
    direct = [additivity(model, text.tokens(model), progress=False)["r"].mean() for text in texts]
    assert means[4000] == pytest.approx(sum(direct) / 2, abs=1e-9)


def test_arguments_and_seeds_reach_the_experiment(tmp_path: Path) -> None:
    line = "sweep --length 32 --no-progress --experiment perturbation_curve --seeds 3-4 --set fractions=[0.5]"
    more = ("--set", "unit=word", "--set", 'kinds=["order"]')
    run_command(line, *more, "--out", tmp_path / "out", "--table", tmp_path / "t.csv")
    table = pd.read_csv(tmp_path / "t.csv")
    assert table["seed"].unique().tolist() == [3, 4]
    assert table["fraction"].unique().tolist() == [0.5]
    assert table["kind"].unique().tolist() == ["order"]


def test_parts_are_those_of_the_library_and_a_whole_run_joins_them(tmp_path: Path) -> None:
    line = f"sweep --length 32 --texts 3 --split 3 --no-progress --set layers=[4] --out {tmp_path / 'out'} --table"
    for part in ("2/2", "1/2"):
        run_command(line, tmp_path / f"{part[0]}.csv", "--part", part)
    run_command(line, tmp_path / "whole.csv")
    first, second, whole = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("1", "2", "whole"))
    pd.testing.assert_frame_equal(pd.concat([first, second], ignore_index=True), whole, check_exact=True)
    todo = jobs("demo", ("additivity", {"layers": [4]}), Text.of("demo", length=32, count=3).split(3))
    mine = sweep(todo, out=tmp_path / "mine", part=(2, 2), progress=False)
    assert second["r"].tolist() == pytest.approx(mine["r"].tolist(), abs=1e-12)


def test_a_sweep_without_results_is_an_error(tmp_path: Path) -> None:
    result = run_command(f"sweep --length 4000 --no-progress --out {tmp_path / 'out'}", code=2)
    reason = "all 1 jobs failed, the first with: text has 3257 tokens, too few for 1 × 4000"
    assert result.stderr.startswith(f"error: {reason}")
    assert result.stderr.count("\n") == 1
