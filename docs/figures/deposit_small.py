"""Train and measure models of the ``small`` preset on reversal and brackets: accuracy, and drops of single heads.

``python docs/figures/deposit_small.py FOLDER`` trains every encoding of the preset from two seeds in one thread; each
model is a row of ``deposit_small.csv`` beside this script, and what has a row is not trained again. ``… FOLDER finish``
prints the page's table, and the accuracies of guesses without a model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import resumed
import torch

from tl_posdisent.synthetic import deposit, head_drops, preset, train_preset

TABLE = Path(__file__).with_name("deposit_small.csv")
SMALL = preset("small")
TASKS = ("reversal", "balanced", "depth")
SEEDS = 2
SAMPLES = 1_000  # of the test samples, for the drops
KEY = ["task", "encoding", "seed"]
NAMES = {"rope": "RoPE", "mla": "MLA", "learned": "learned absolute", "none": "none (NoPE)", "alibi": "ALiBi"}
Model = tuple[str, str, int]


def models() -> list[Model]:
    """The first seed of every task and encoding, then the other seeds."""
    return [(task, encoding, seed) for seed in range(SEEDS) for task in TASKS for encoding in SMALL.encodings]


def row_of(key: Model, folder: Path) -> dict[str, Any]:
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


def finished() -> pd.DataFrame:
    """All models that were measured, one row each."""
    return resumed.finished(TABLE, KEY)


def main(folder: Path) -> None:
    resumed.fill(TABLE, KEY, models(), lambda key: row_of(key, folder))


def most_frequent(tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Accuracy on reversal of one of the most frequent tokens of each text, drawn at random."""
    counts = torch.stack([(tokens == token).sum(1) for token in range(2, int(tokens.max()) + 1)], 1)
    best = counts == counts.amax(1, keepdim=True)
    return float((best.gather(1, labels[:, None])[:, 0] / best.sum(1)).mean())


def area(tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Accuracy of the best threshold on the sum of depths before each place, to tell balanced brackets."""
    depth = ((tokens == 1).long() - (tokens == 2).long()).cumsum(1)
    areas = depth[:, :-1].sum(1)
    bounds = torch.cat([areas.unique(), areas.max()[None] + 1])
    return float(((areas[:, None] >= bounds) == (labels[:, None] == 1)).double().mean(0).max())


def guesses() -> dict[str, dict[str, float]]:
    """Accuracies of guesses without a model, on new texts: of a constant, and of the best simple rule."""
    found = {}
    for task in TASKS:
        source: Any = SMALL.tasks[task]
        samples = source.batch(20_000, seed=99)
        rules = {"reversal": most_frequent, "balanced": area}
        rule = rules[task](*samples) if task in rules else source.from_length
        found[task] = {"chance": source.chance, "rule": rule}
    return found


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The page's table: means over seeds ± standard deviation, of accuracies, and of RoPE's effective heads."""
    rows = []
    for task in TASKS:
        of = dict(list(table[table["task"] == task].groupby("encoding")))
        row = {"task": task} | {NAMES[encoding]: spread(of[encoding]["accuracy"]) for encoding in SMALL.encodings}
        for mode, word in (("zero", "zeroed"), ("mean", "mean")):
            row[f"RoPE's effective heads, {word}"] = spread(of["rope"][f"{mode}_effective_heads"], 1)
        rows.append(row)
    return pd.DataFrame(rows)


def spread(values: pd.Series, digits: int = 2) -> str:
    """Mean and standard deviation over models; – where no head has a drop, so that there is no number of heads."""
    known = values.dropna()
    text = f"{known.mean():.{digits}f}" if len(known) else "–"
    return f"{text}±{known.std():.{digits}f}" if len(known) > 1 else text


if __name__ == "__main__":
    if sys.argv[2:] == ["finish"]:
        print(summary(finished()).to_string(index=False), guesses(), sep="\n")
    else:
        main(Path(sys.argv[1]))
