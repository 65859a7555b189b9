"""Train and measure models of six layers of 16 heads: necessity and sufficiency of heads.

``python docs/studies deposit_96_heads FOLDER [minutes]`` trains models (size, task, encoding, rotary heads in each
layer, seed), the most informative ones first, until all are done or the time is up. Each is a row of
``tables/deposit_96_heads.csv``; what has a row is not trained again. ``deposit_96_tables`` prints the page's tables.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shared.deposit_cells import MEDIUM, PAPER, STEPS, Cell, cells
from shared.deposits import HEADS
from shared.resumed import fill

from tl_posdisent.synthetic import SyntheticModel, TrainRun, deposit, head_drops, sufficient_heads, train_preset

# The published shape and task, in smaller batches with a larger learning rate.
ON_A_CPU = replace(PAPER.training, batch_size=48, lr=5e-4, betas=(0.9, 0.98), epochs=1, n_test=1_000)
SAMPLES = 128  # not seen in training: of another seed
KEY = ["size", "task", "encoding", "rotary_heads", "seed"]


def measured(model: SyntheticModel, tokens: torch.Tensor, labels: torch.Tensor, *, attention: bool) -> dict[str, Any]:
    """Drops of accuracy and loss, zeroed and mean-ablated, and the sufficient sets (``attention``: of both kinds)."""
    row: dict[str, Any] = {}
    for mode in ("zero", "mean"):
        drops = head_drops(model, tokens, labels, mode=mode, progress=False)  # type: ignore[arg-type]
        for measure, name in (("metric", "accuracy"), ("loss", "loss")):
            report = deposit(drops, measure=measure)  # type: ignore[arg-type]
            values = report.to_frame().drop(columns=["layer", "head"]).iloc[0].to_dict()
            values |= {"layer": report.layer, "head": report.head}
            row |= {f"{mode}_{name}_{key}": value for key, value in values.items()}
    for by in [*["rotation"] * model.encoding.rotates, *["attention"] * attention]:
        sets = sufficient_heads(model, tokens, labels, by=by, order=drops, progress=False)  # type: ignore[arg-type]
        one = sets.path.query("heads >= 1")["accuracy"].iloc[-1] if sets.heads else sets.none
        row |= {f"{by}_heads": len(sets.heads), f"{by}_none": sets.none, f"{by}_one": one}
        row |= {f"{by}_accuracy": sets.accuracy, f"{by}_set": " ".join(f"{n}.{h}" for n, h in sets.heads)}
    return row


def trained(size: str, task: str, encoding: str, rotary_heads: int, seed: int, folder: Path) -> TrainRun:
    """Train one model; its weights at the end are in the folder."""
    if size == "medium":
        sizes = MEDIUM
    else:
        how = replace(ON_A_CPU, n_train=ON_A_CPU.batch_size * STEPS[task, encoding])
        sizes = replace(PAPER, training=replace(how, test_every=250, precision="bfloat16"), per_task={})
    changed, where = {}, folder / "trainings"
    if 0 < rotary_heads < HEADS:
        changed, where = {"rotary_heads": rotary_heads}, folder / f"trainings-{rotary_heads}-rotary"
    options: dict[str, Any] = {"encodings": [encoding], "tasks": [task], "seeds": [seed], "folder": where}
    (run,) = train_preset(sizes, **options, **changed, progress=size == "paper").values()
    return run


def row_of(chosen: Cell, folder: Path) -> dict[str, Any]:
    """Train and measure one model."""
    run = trained(*chosen, folder)
    row: dict[str, Any] = dict(zip(KEY, chosen, strict=True))
    row |= {"steps": run.steps, "accuracy": run.test_accuracy, "loss": run.test_loss}
    attention = row["size"] == "medium" and row["seed"] == 0 and row["rotary_heads"] in (0, HEADS)
    return row | measured(run.model, *run.task.batch(SAMPLES, seed=99), attention=attention)


def main(folder: str, minutes: str = "inf") -> None:
    """Train and measure models into ``tables/deposit_96_heads.csv``."""
    fill("deposit_96_heads", KEY, cells(), lambda key: row_of(key, Path(folder)), float(minutes))
