"""Small models on reversal and brackets: accuracy, and drops of single heads.

``python docs/studies deposit_small FOLDER`` trains every encoding of the preset ``small`` from two seeds; without a
folder it prints the page's table. ``deposit_guesses`` has the accuracies of guesses without a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from shared.deposits import SMALL_NAMES, markdown, spread
from shared.rows import TABLES

from tl_posdisent.synthetic import deposit, head_drops, preset, train_preset

SMALL = preset("small")
TASKS = ("reversal", "balanced", "depth")
SEEDS = 2
SAMPLES = 1_000  # of the test samples, for the drops
KEY = ["task", "encoding", "seed"]
MODELS = [(task, encoding, seed) for seed in range(SEEDS) for task in TASKS for encoding in SMALL.encodings]


def row_of(key: tuple[str, str, int], folder: Path) -> dict[str, Any]:
    """Train one model, and measure its accuracy on the test samples and its deposit on some of them."""
    task, encoding, seed = key
    options: dict[str, Any] = {"encodings": [encoding], "tasks": [task], "seeds": [seed], "folder": folder}
    (run,) = train_preset(SMALL, **options, progress=False).values()
    row: dict[str, Any] = dict(zip(KEY, key, strict=True))
    row |= {"steps": run.steps, "accuracy": run.test_accuracy, "loss": run.test_loss}
    split = run.split()
    for mode in ("zero", "mean"):
        samples = split.test_tokens[:SAMPLES], split.test_labels[:SAMPLES]
        report = deposit(head_drops(run.model, *samples, mode=mode, progress=False))  # type: ignore[arg-type]
        for name in ("drop", "second", "share", "effective_heads", "layer", "head"):
            row[f"{mode}_{name}"] = getattr(report, name)
    return row


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The page's table: means over seeds ± standard deviation, of accuracies, and of RoPE's effective heads."""
    rows = []
    for task in TASKS:
        of = dict(list(table[table["task"] == task].groupby("encoding")))
        row = {"task": task} | {SMALL_NAMES[encoding]: spread(of[encoding]["accuracy"]) for encoding in SMALL.encodings}
        for mode, word in (("zero", "zeroed"), ("mean", "mean")):
            row[f"RoPE's effective heads, {word}"] = spread(of["rope"][f"{mode}_effective_heads"], 1)
        rows.append(row)
    return pd.DataFrame(rows)


def main(folder: str = "") -> None:
    """Train and measure models into ``tables/deposit_small.csv``, or print the page's table."""
    path = TABLES / "deposit_small.csv"
    if folder:
        pd.DataFrame([row_of(key, Path(folder)) for key in MODELS]).sort_values(KEY).round(4).to_csv(path, index=False)
    print(markdown(summary(pd.read_csv(path))))
