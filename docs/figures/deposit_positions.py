"""Where do small models keep positional work, if a head loses its positions instead of its output?

``python docs/figures/deposit_positions.py FOLDER`` trains RoPE and MLA models of the ``small`` preset on the distance
between two triggers, from three seeds in one thread. Each model is a row of ``deposit_positions.csv`` beside this
script: drops of accuracy where one head no longer rotates its queries and keys (with MLA, their rotary slice), and
where its output is zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import resumed
import torch
from deposit_small import NAMES, spread
from torch import Tensor

from tl_posdisent import limit_frequencies
from tl_posdisent.hooks import applied
from tl_posdisent.synthetic import deposit, head_drops, preset, train_preset

TABLE = Path(__file__).with_name("deposit_positions.csv")
SMALL = preset("small")
SEEDS, SAMPLES = 3, 1_000
KEY = ["encoding", "seed"]
Head = tuple[int, int]


def accuracy(model: Any, tokens: Tensor, labels: Tensor, hooks: Any = ()) -> float:
    """The share of texts whose most likely label is right, under hooks."""
    with torch.no_grad(), applied(model, hooks):
        return float((model(tokens).argmax(-1) == labels).double().mean())


def drops(model: Any, tokens: Tensor, labels: Tensor, hooks_of: Callable[[list[Head]], Any]) -> pd.DataFrame:
    """A table as ``head_drops`` returns it, with these hooks of each head."""
    base, heads = accuracy(model, tokens, labels), range(model.cfg.n_heads)
    every = [(layer, head) for layer in range(model.cfg.n_layers) for head in heads]
    effects = [accuracy(model, tokens, labels, hooks_of([one])) - base for one in every]
    rows = [(*one, base, effect) for one, effect in zip(every, effects, strict=True)]
    return pd.DataFrame(rows, columns=["layer", "head", "baseline", "effect"])


def row_of(key: tuple[str, int], folder: Path) -> dict[str, Any]:
    """Train one model and measure it."""
    encoding, seed = key
    options: dict[str, Any] = {"encodings": [encoding], "tasks": ["distance"], "seeds": [seed], "folder": folder}
    (run,) = train_preset(SMALL, **options, progress=False).values()
    model, split = run.model.eval(), run.split()
    samples = split.test_tokens[:SAMPLES], split.test_labels[:SAMPLES]
    tables = {
        "frozen": drops(model, *samples, lambda heads: limit_frequencies(model, high=0, mode="freeze", heads=heads)),
        "zero": head_drops(model, *samples, mode="zero", progress=False),
    }
    row: dict[str, Any] = dict(zip(KEY, key, strict=True)) | {"accuracy": run.test_accuracy}
    for name, table in tables.items():
        report = deposit(table)
        row |= {f"{name}_{what}": getattr(report, what) for what in ("drop", "second", "effective_heads", "layer")}
    return row


def models() -> list[tuple[str, int]]:
    return [(encoding, seed) for seed in range(SEEDS) for encoding in ("mla", "rope")]


def finished() -> pd.DataFrame:
    """All models that were measured, one row each."""
    return resumed.finished(TABLE, KEY)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The page's table: means over seeds ± standard deviation."""
    columns = {
        "largest drop, positions": "frozen_drop",
        "second": "frozen_second",
        "effective heads": "frozen_effective_heads",
    }
    rows = []
    for encoding, of in table.groupby("encoding"):
        row = {name: spread(of[column], 1 if "effective" in name else 2) for name, column in columns.items()}
        rows.append({"encoding": NAMES[str(encoding)], **row})
    return pd.DataFrame(rows)


def main(folder: Path) -> None:
    resumed.fill(TABLE, KEY, models(), lambda key: row_of(key, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
