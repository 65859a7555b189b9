"""Train and measure the models of the ``medium`` preset: necessity and sufficiency of heads, cell by cell.

``python docs/figures/deposit_medium.py FOLDER [minutes]`` trains and measures cells (encoding, number of gaps, seed)
in one thread, the most informative ones first, until all are done or the time is up. It can be stopped at any moment
and goes on where it was. Each finished cell is a JSON file in ``FOLDER/cells``, and all of them are written to
``deposit_medium.csv`` beside this script, the numbers of the page on the deposit. ``… FOLDER finish`` writes what was
measured, draws ``deposit_medium.svg``, and compares the positional subspaces of the trained models
(``displaced_subspace.csv``).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from tl_posdisent.experiments import positional_subspace
from tl_posdisent.rope import principal_angles
from tl_posdisent.synthetic import (
    SyntheticModel,
    deposit,
    head_drops,
    load_checkpoint,
    preset,
    sufficient_heads,
    train_preset,
)
from tl_posdisent.utils.files import whole_file
from tl_posdisent.viz.palette import HUES

TABLE = Path(__file__).with_name("deposit_medium.csv")
MEDIUM = preset("medium")
HALFWAY = 200  # the weights after so many steps are kept too: less slack, the same model
SAMPLES = 128  # not seen in training: of another seed
NAMES = {"rope": "rotation alone", "sinusoidal_rope": "hybrid", "sinusoidal": "absolute"}
FIRST = tuple(NAMES)


def cells() -> list[tuple[int, str, int]]:
    """Gaps, encoding, seed: rotation, hybrid and absolute on 8 to 32 gaps first, then the other encodings and 70."""
    parts: list[tuple[tuple[int, ...], tuple[str, ...]]] = [((8, 16, 32), FIRST), ((8, 16, 32, 70), MEDIUM.encodings)]
    every = [(n, name, seed) for gaps, names in parts for seed in range(5) for n in gaps for name in names]
    return list(dict.fromkeys(every))


def measured(model: SyntheticModel, gaps: int, *, attention: bool = True) -> dict[str, Any]:
    """Drops of accuracy and loss, zeroed and mean-ablated, and the sufficient sets (``attention``: of both kinds)."""
    tokens, labels = MEDIUM.tasks[f"gap{gaps}"].batch(SAMPLES, seed=99)
    found: dict[str, Any] = {}
    for mode in ("zero", "mean"):
        drops = head_drops(model, tokens, labels, mode=mode, progress=False)  # type: ignore[arg-type]
        for measure, name in (("metric", "accuracy"), ("loss", "loss")):
            report = deposit(drops, measure=measure)  # type: ignore[arg-type]
            row = report.to_frame().drop(columns=["layer", "head"]).iloc[0].to_dict()
            row |= {"layer": report.layer, "head": report.head}
            found |= {f"{mode}_{name}_{key}": value for key, value in row.items()}
    for by in [*["rotation"] * model.encoding.rotates, *["attention"] * attention]:
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
    return row | {"accuracy": run.test_accuracy, "loss": run.test_loss} | measured(run.model, gaps, attention=seed == 0)


def write_table(folder: Path) -> pd.DataFrame:
    """All finished cells, one row each."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "cells").glob("*.json"))]
    table = pd.DataFrame(rows).sort_values(["gaps", "encoding", "seed"], ignore_index=True)
    with whole_file(TABLE) as file:
        file.write(table.round(4).to_csv(index=False).encode("utf-8"))
    return table


def draw(table: pd.DataFrame) -> go.Figure:
    """Effective heads, largest drop and sufficient heads of every training, against its loss."""
    panels = {
        "mean_loss_effective_heads": "effective heads (loss)",
        "mean_accuracy_drop": "largest drop of accuracy",
        "rotation_heads": "sufficient rotating heads",
    }
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels.values()))
    symbols = {8: "circle", 16: "square", 32: "diamond", 70: "cross"}
    for column, measure in enumerate(panels, start=1):
        for number, (name, label) in enumerate(NAMES.items()):
            rows = table[table["encoding"] == name]
            marker = {"symbol": rows["gaps"].map(symbols), "color": HUES[number], "size": 9}
            style = {"name": label, "legendgroup": name, "showlegend": column == 1}
            figure.add_scatter(
                x=rows["loss"], y=rows[measure], mode="markers", marker=marker, row=1, col=column, **style
            )
    return figure.update_xaxes(type="log", title="loss after training (nats)")


def displaced(folder: Path) -> pd.DataFrame:
    """Principal angles, in degrees, of the four leading positional directions before layer 0 and each later layer."""
    rows = []
    for path in sorted((folder / "trainings").glob("gap*-sinusoidal*-seed*")):
        task, encoding, seed = path.name.split("-")
        if not list(path.glob("step-*.safetensors")):
            continue
        tokens, _ = MEDIUM.tasks[task].batch(512, seed=99)
        lengths = (tokens != MEDIUM.model(encoding, task).config.pad_id).sum(1)
        width = int(lengths.double().quantile(0.75))
        texts = tokens[lengths >= width][:, :width]
        last = max(path.glob("step-*.safetensors"), key=lambda file: file.name)
        for state, model in (("new", MEDIUM.model(encoding, task, int(seed[4:]))), ("trained", load_checkpoint(last))):
            found = [positional_subspace(model, texts, layer, rank=4) for layer in range(6)]
            for layer, each in enumerate(found):
                angles = sorted(principal_angles(found[0].basis, each.basis).rad2deg().tolist(), reverse=True)
                row = {"encoding": encoding, "task": task, "seed": seed, "model": state, "layer": layer}
                rows.append(row | {"share": each.share} | {f"angle{n}": x for n, x in enumerate(angles)})
    return pd.DataFrame(rows).round(2)


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
    if sys.argv[2:] == ["finish"]:
        from make import save

        save(draw(write_table(Path(sys.argv[1]))), "deposit_medium", 960, 360, None)
        displaced(Path(sys.argv[1])).to_csv(TABLE.with_name("displaced_subspace.csv"), index=False)
        sys.exit()
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else float("inf"))
