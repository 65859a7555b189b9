"""Train and measure the models of the ``medium`` preset: necessity and sufficiency of heads, cell by cell.

``python docs/figures/deposit_medium.py FOLDER [minutes]`` trains and measures cells (encoding, number of gaps, seed)
in one thread, the most informative ones first, until all are done or the time is up. It can be stopped at any moment
and goes on where it was. Each finished cell is a JSON file in ``FOLDER/cells``, and all of them are written to
``deposit_medium.csv`` beside this script, the numbers of the page on the deposit.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from tl_posdisent.synthetic import SyntheticModel, deposit, head_drops, preset, sufficient_heads, train_preset
from tl_posdisent.utils.files import whole_file

TABLE = Path(__file__).with_name("deposit_medium.csv")
MEDIUM = preset("medium")
HALFWAY = 200  # the weights after so many steps are kept too: less slack, the same model
SAMPLES = 128  # not seen in training: of another seed
FIRST = ("rope", "sinusoidal_rope", "sinusoidal")
_PARTS = [
    ((16, 8), [0], FIRST),
    ((8, 16), [1], FIRST),
    ((32,), [0], FIRST),
    ((8, 16), [2], FIRST),
    ((32,), [1, 2], FIRST),
]
_PARTS += [((8, 16, 32), range(5), FIRST), ((8, 16, 32, 70), range(5), MEDIUM.encodings)]


def cells() -> list[tuple[int, str, int]]:
    """Gaps, encoding, seed: rotation, hybrid and absolute on 8 to 32 gaps first, then the other encodings and 70."""
    every = [(n, name, seed) for gaps, seeds, names in _PARTS for seed in seeds for n in gaps for name in names]
    return list(dict.fromkeys(every))


def measured(model: SyntheticModel, gaps: int) -> dict[str, Any]:
    """Drops of accuracy and loss, zeroed and mean-ablated, and the sufficient sets."""
    tokens, labels = MEDIUM.tasks[f"gap{gaps}"].batch(SAMPLES, seed=99)
    found: dict[str, Any] = {}
    for mode in ("zero", "mean"):
        drops = head_drops(model, tokens, labels, mode=mode, progress=False)  # type: ignore[arg-type]
        for measure, name in (("metric", "accuracy"), ("loss", "loss")):
            report = deposit(drops, measure=measure)  # type: ignore[arg-type]
            row = report.to_frame().drop(columns=["layer", "head"]).iloc[0].to_dict()
            row |= {"layer": report.layer, "head": report.head}
            found |= {f"{mode}_{name}_{key}": value for key, value in row.items()}
    for by in ("rotation", "attention") if model.encoding.rotates else ("attention",):
        sets = sufficient_heads(model, tokens, labels, by=by, order=drops)  # type: ignore[arg-type]
        one = sets.at(1)[0] if sets.heads else sets.none
        found |= {f"{by}_heads": len(sets.heads), f"{by}_none": sets.none, f"{by}_one": one}
        found |= {f"{by}_accuracy": sets.accuracy, f"{by}_set": " ".join(f"{n}.{h}" for n, h in sets.heads)}
    return found


def cell(gaps: int, encoding: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train and measure one model."""
    options: dict[str, Any] = {"encodings": [encoding], "tasks": [f"gap{gaps}"], "seeds": [seed], "progress": False}
    kept = replace(MEDIUM, training=replace(MEDIUM.training, checkpoints=(HALFWAY,)))
    (run,) = train_preset(kept, folder=folder / "trainings", **options).values()
    row: dict[str, Any] = {"encoding": encoding, "gaps": gaps, "seed": seed, "steps": run.steps}
    return row | {"accuracy": run.test_accuracy, "loss": run.test_loss} | measured(run.model, gaps)


def write_table(folder: Path) -> pd.DataFrame:
    """All finished cells, one row each."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "cells").glob("*.json"))]
    table = pd.DataFrame(rows).sort_values(["gaps", "encoding", "seed"], ignore_index=True)
    with whole_file(TABLE) as file:
        file.write(table.round(4).to_csv(index=False).encode("utf-8"))
    return table


def main(folder: Path, minutes: float) -> None:
    torch.set_num_threads(1)
    start = time.monotonic()
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    for gaps, encoding, seed in cells():
        path = folder / "cells" / f"gap{gaps}-{encoding}-seed{seed}.json"
        if path.exists():
            continue
        if time.monotonic() - start > 60 * minutes:
            break
        row = cell(gaps, encoding, seed, folder)
        with whole_file(path) as file:
            file.write(json.dumps(row).encode("utf-8"))
        print(f"{encoding}, {gaps} gaps, seed {seed}: accuracy {row['accuracy']:.3f}", flush=True)
        write_table(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else float("inf"))
