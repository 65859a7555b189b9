"""Small models on the distance of two triggers: their deposit, and their accuracy on longer texts.

The task has 8 distances and 1 to 4 fillers on each side, in texts of 5 to 18 tokens. The longer texts ask for the same
distances: there are ``more`` fillers before the first trigger, and as many more after the second one. ``python
docs/studies deposit_and_length FOLDER`` trains models; ``deposit_correlations`` prints the page's tables.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from shared.deposits import ROTATING
from shared.rows import TABLES

from tl_posdisent.synthetic import TriggerDistance, deposit, evaluate, head_drops, preset, train_preset

SMALL = preset("small")
TASK = TriggerDistance(d_vocab=32, max_gap=8, max_side=4, n_ctx=18)
STUDY = replace(SMALL, tasks={"gap8": TASK}, settings={**SMALL.settings, "n_train": 32_000, "n_test": 1_000})
MORE = {"1": 0, "1.25": 2, "1.5": 4, "2": 9}  # fillers added on each side; longest texts of 18, 22, 26 and 36 tokens
TEXTS = 1_000  # not seen in training: of another seed
KEY = ["encoding", "rotary_heads", "seed"]
Model = tuple[str, int, int]


def models() -> list[Model]:
    """Rotation alone and the hybrid with one to all of four rotary heads in each layer, and MLA with three seeds."""
    rotating = [(name, heads, seed) for seed in range(4) for name in ROTATING for heads in (1, 2, 3, 4)]
    return rotating + [("mla", 4, seed) for seed in range(12)]


def longer(more: int) -> TriggerDistance:
    """The task with so many fillers more on each side."""
    sides = {"min_side": TASK.min_side + more, "max_side": TASK.max_side + more}
    return replace(TASK, **sides, n_ctx=TASK.n_ctx + 2 * more)


def row_of(key: Model, folder: Path) -> dict[str, Any]:
    """Train one model; measure its loss and accuracy at each length, and its deposit at the length of training."""
    encoding, heads, seed = key
    changed = {} if encoding == "mla" else {"rotary_heads": heads}
    where = folder / f"trainings-{heads}-rotary"
    options: dict[str, Any] = {"encodings": [encoding], "tasks": ["gap8"], "seeds": [seed], "folder": where}
    (run,) = train_preset(STUDY, **options, **changed, progress=False).values()
    row: dict[str, Any] = dict(zip(KEY, key, strict=True))
    for name, more in MORE.items():
        row[f"loss_{name}"], row[f"accuracy_{name}"] = evaluate(run.model, *longer(more).batch(TEXTS, seed=99))
    tokens, labels = TASK.batch(TEXTS // 2, seed=98)
    for mode in ("zero", "mean"):
        drops = head_drops(run.model, tokens, labels, mode=mode, progress=False)  # type: ignore[arg-type]
        for measure, of in (("metric", "accuracy"), ("loss", "loss")):
            report = deposit(drops, measure=measure)  # type: ignore[arg-type]
            for name in ("drop", "second", "share", "effective_heads", "layer"):
                row[f"{mode}_{of}_{name}"] = getattr(report, name)
    return row


def main(folder: str) -> None:
    """Train and measure models into ``tables/deposit_and_length.csv``."""
    rows = [row_of(key, Path(folder)) for key in models()]
    pd.DataFrame(rows).sort_values(KEY).round(4).to_csv(TABLES / "deposit_and_length.csv", index=False)
