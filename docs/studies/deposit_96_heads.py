"""Train and measure models of six layers of 16 heads: necessity and sufficiency of heads.

``python docs/studies deposit_96_heads FOLDER`` trains the models of ``tables/deposit_96_heads.csv`` again into the
folder, for days of one core, and writes their numbers. ``deposit_96_tables`` prints the page's tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from shared.deposits import HEADS
from shared.rows import TABLES
from torch import Tensor

from tl_posdisent.synthetic import SyntheticModel, TrainRun, deposit, head_drops, preset, sufficient_heads, train_preset

MEDIUM, PAPER = preset("medium"), preset("paper")
# Of models of the published shape, on the published task: smaller batches with a larger learning rate.
ON_A_CPU: dict[str, Any] = {"batch_size": 48, "lr": 5e-4, "betas": (0.9, 0.98), "epochs": 1, "n_test": 1_000}
ON_A_CPU |= {"test_every": 250, "precision": "bfloat16"}
STEPS = {("distance", "sinusoidal_rope"): 1200, ("distance", "rope"): 2000, ("count", "sinusoidal_rope"): 900}
SAMPLES = 128  # not seen in training: of another seed
KEY = ["size", "task", "encoding", "rotary_heads", "seed"]


def trained(size: str, task: str, encoding: str, rotary_heads: int, seed: int, folder: Path) -> TrainRun:
    """Train one model; its weights at the end are in the folder."""
    options: dict[str, Any] = {"encodings": [encoding], "tasks": [task], "seeds": [seed], "progress": size == "paper"}
    options["folder"] = folder / "trainings"
    if size == "paper":
        options |= ON_A_CPU | {"n_train": ON_A_CPU["batch_size"] * STEPS[task, encoding]}
    if 0 < rotary_heads < HEADS:
        options |= {"rotary_heads": rotary_heads, "folder": folder / f"trainings-{rotary_heads}-rotary"}
    (run,) = train_preset(PAPER if size == "paper" else MEDIUM, **options).values()
    return run


def measured(model: SyntheticModel, tokens: Tensor, labels: Tensor) -> dict[str, Any]:
    """Drops of accuracy and loss, zeroed and mean-ablated, and the heads whose rotation suffices."""
    row: dict[str, Any] = {}
    for mode in ("zero", "mean"):
        drops = head_drops(model, tokens, labels, mode=mode, progress=False)  # type: ignore[arg-type]
        for measure, name in (("metric", "accuracy"), ("loss", "loss")):
            report = deposit(drops, measure=measure)  # type: ignore[arg-type]
            row |= {f"{mode}_{name}_{x}": getattr(report, x) for x in ("drop", "second", "layer", "head")}
    if model.encoding.rotates:
        sets = sufficient_heads(model, tokens, labels, order=drops, progress=False)
        one = sets.path.query("heads >= 1")["accuracy"].iloc[-1] if sets.heads else sets.none
        row |= {"rotation_heads": len(sets.heads), "rotation_none": sets.none, "rotation_one": one}
    return row


def main(folder: str) -> None:
    """Train and measure the models of the table."""
    path, rows = TABLES / "deposit_96_heads.csv", []
    for cell in pd.read_csv(path)[KEY].itertuples(index=False, name=None):
        run = trained(*cell, Path(folder))
        row = dict(zip(KEY, cell, strict=True)) | {"steps": run.steps, "accuracy": run.test_accuracy}
        rows.append(row | measured(run.model, *run.task.batch(SAMPLES, seed=99)))
    pd.DataFrame(rows).round(4).to_csv(path, index=False)
