"""Where do small models keep positional work, if a head loses its positions instead of its output?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from shared.deposits import SMALL_NAMES, markdown, spread
from shared.rows import TABLES
from torch import Tensor

from tl_posdisent import limit_frequencies
from tl_posdisent.hooks import applied
from tl_posdisent.synthetic import deposit, head_drops, preset, train_preset

SMALL = preset("small")
SEEDS, SAMPLES = 3, 1_000
KEY = ["encoding", "seed"]
MODELS = [(encoding, seed) for seed in range(SEEDS) for encoding in ("mla", "rope")]


def frozen(model: Any, tokens: Tensor, labels: Tensor) -> pd.DataFrame:
    """A table as ``head_drops`` returns it, of heads that keep their output and lose their positions."""
    heads = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    accuracy = []
    for hooks in ([], *(limit_frequencies(model, high=0, mode="freeze", heads=[head]) for head in heads)):
        with torch.no_grad(), applied(model, hooks):
            accuracy.append(float((model(tokens).argmax(-1) == labels).double().mean()))
    table = pd.DataFrame(heads, columns=["layer", "head"])
    return table.assign(baseline=accuracy[0], effect=[x - accuracy[0] for x in accuracy[1:]])


def row_of(key: tuple[str, int], folder: Path) -> dict[str, Any]:
    """Train one model and measure it."""
    encoding, seed = key
    options: dict[str, Any] = {"encodings": [encoding], "tasks": ["distance"], "seeds": [seed], "folder": folder}
    (run,) = train_preset(SMALL, **options, progress=False).values()
    model, split = run.model.eval(), run.split()
    samples = split.test_tokens[:SAMPLES], split.test_labels[:SAMPLES]
    tables = {
        "frozen": frozen(model, *samples),
        "zero": head_drops(model, *samples, mode="zero", progress=False),
    }
    row: dict[str, Any] = dict(zip(KEY, key, strict=True)) | {"accuracy": run.test_accuracy}
    for name, table in tables.items():
        report = deposit(table)
        row |= {f"{name}_{what}": getattr(report, what) for what in ("drop", "second", "effective_heads", "layer")}
    return row


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
        rows.append({"encoding": SMALL_NAMES[str(encoding)], **row})
    return pd.DataFrame(rows)


def main(folder: str = "") -> None:
    """Train and measure models into ``tables/deposit_positions.csv``, or print the page's table."""
    path = TABLES / "deposit_positions.csv"
    if folder:
        pd.DataFrame([row_of(key, Path(folder)) for key in MODELS]).sort_values(KEY).round(4).to_csv(path, index=False)
    print(markdown(summary(pd.read_csv(path))))
