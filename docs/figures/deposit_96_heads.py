"""Train and measure models of six layers of 16 heads, those of the ``medium`` preset and two of the paper's size:
necessity and sufficiency of heads, cell by cell.

``python docs/figures/deposit_96_heads.py FOLDER [minutes]`` trains and measures cells (size, encoding, number of gaps,
seed) in one thread, the most informative ones first, until all are done or the time is up. It can be stopped at any
moment and goes on where it was. Each finished cell is a row of ``deposit_96_heads.csv`` beside this script, the numbers
of the page on the deposit; what has a row is not trained again. ``… FOLDER paper`` trains the models of the paper's
size. ``… FOLDER finish`` draws ``deposit_96_heads.svg``, prints the page's table, and compares the positional subspaces
of the models that were trained into the folder (``displaced_subspace.csv``).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
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

TABLE = Path(__file__).with_name("deposit_96_heads.csv")
ANGLES = Path(__file__).with_name("displaced_subspace.csv")
MEDIUM, PAPER = preset("medium"), preset("paper")
# The published shape and task, in smaller batches with a larger learning rate.
ON_A_CPU = replace(PAPER.training, batch_size=48, lr=5e-4, betas=(0.9, 0.98), epochs=1, n_test=1_000)
STEPS = {"sinusoidal_rope": 1200, "rope": 2000}
HALFWAY = 200  # the weights after so many steps are kept too: less slack, the same model
SAMPLES = 128  # not seen in training: of another seed
NAMES = {
    "rope": "rotation alone",
    "sinusoidal_rope": "hybrid",
    "sinusoidal": "absolute",
    "random": "random absolute",
    "t5": "T5",
    "alibi": "ALiBi",
}
FIRST = ("rope", "sinusoidal_rope", "sinusoidal")
KEY = ["size", "encoding", "gaps", "seed"]


def cells() -> list[tuple[str, str, int, int]]:
    """Size, encoding, gaps, seed: every encoding on 16 gaps, then more seeds and other gaps of three, then the rest."""
    others = range(1, 5)
    parts: list[tuple[int, tuple[str, ...], Sequence[int]]] = [(16, MEDIUM.encodings, [0]), (16, FIRST, others)]
    parts += [(32, FIRST, [0]), (8, FIRST, others), (32, FIRST, others), (70, FIRST, [0])]
    parts += [(n, MEDIUM.encodings, range(5)) for n in (8, 16, 32, 70)]
    every = [("medium", name, n, seed) for n, names, seeds in parts for seed in seeds for name in names]
    return list(dict.fromkeys(every))


def measured(model: SyntheticModel, tokens: torch.Tensor, labels: torch.Tensor, *, attention: bool) -> dict[str, Any]:
    """Drops of accuracy and loss, zeroed and mean-ablated, and the sufficient sets (``attention``: of both kinds)."""
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
        one = sets.path.query("heads >= 1")["accuracy"].iloc[-1] if sets.heads else sets.none
        found |= {f"{by}_heads": len(sets.heads), f"{by}_none": sets.none, f"{by}_one": one}
        found |= {f"{by}_accuracy": sets.accuracy, f"{by}_set": " ".join(f"{n}.{h}" for n, h in sets.heads)}
    return found


def cell(size: str, encoding: str, gaps: int, seed: int, folder: Path) -> dict[str, Any]:
    """Train and measure one model."""
    options: dict[str, Any] = {"encodings": [encoding], "seeds": [seed], "folder": folder / "trainings"}
    if size == "medium":
        kept = replace(MEDIUM, training=replace(MEDIUM.training, checkpoints=(HALFWAY,)))
        task, options["tasks"] = MEDIUM.tasks[f"gap{gaps}"], [f"gap{gaps}"]
    else:
        how = replace(ON_A_CPU, n_train=ON_A_CPU.batch_size * STEPS[encoding])
        checkpoints = tuple(range(0, how.steps, 250))
        kept = replace(PAPER, training=replace(how, checkpoints=checkpoints, test_every=250, precision="bfloat16"))
        task, options["tasks"] = PAPER.tasks["distance"], ["distance"]
    (run,) = train_preset(kept, **options, progress=size == "paper").values()
    row: dict[str, Any] = dict(zip(KEY, (size, encoding, gaps, seed), strict=True))
    row |= {"steps": run.steps, "accuracy": run.test_accuracy, "loss": run.test_loss}
    return row | measured(run.model, *task.batch(SAMPLES, seed=99), attention=seed == 0 and size == "medium")


def finished() -> pd.DataFrame:
    """All cells that were measured, one row each."""
    return pd.read_csv(TABLE)


def add(row: dict[str, Any]) -> None:
    """Write the table with one more row."""
    table = pd.concat([finished(), pd.DataFrame([row])]).sort_values(KEY, ignore_index=True)
    with whole_file(TABLE) as file:
        file.write(table.round(4).to_csv(index=False).encode("utf-8"))


def one_necessary(table: pd.DataFrame) -> pd.Series:
    """The models with one necessary head: with its mean in its place accuracy falls by 0.1 or more, four times as far
    as for any other head."""
    largest, second = table["mean_accuracy_drop"], table["mean_accuracy_second"]
    return (largest >= 0.1) & (largest >= 4 * second)


def spread(values: pd.Series, digits: int = 2) -> str:
    """Mean and standard deviation over models; – where nothing was measured."""
    known = values.dropna()
    text = f"{known.mean():.{digits}f}" if len(known) else "–"
    return f"{text} ± {known.std():.{digits}f}" if len(known) > 1 else text


def span(values: pd.Series) -> str:
    """The least and the greatest; – where nothing was measured."""
    known = sorted({int(x) for x in values.dropna()})
    return "–" if not known else str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The page's table: one row per size, number of distances and encoding, over seeds."""
    order = {name: number for number, name in enumerate(NAMES)}
    rows = []
    for (_, gaps, _), of in table.groupby(["size", "gaps", table["encoding"].map(order)]):
        name = NAMES[of["encoding"].iloc[0]]
        rows.append(
            {
                "distances": f"{gaps}, the paper's size" if of["size"].iloc[0] == "paper" else str(gaps),
                "encoding": name,
                "seeds": str(len(of)),
                "accuracy": spread(of["accuracy"]),
                "loss": spread(of["loss"], 3),
                "zeroed: largest drop": spread(of["zero_accuracy_drop"]),
                "second": spread(of["zero_accuracy_second"]),
                "mean: largest drop": spread(of["mean_accuracy_drop"]),
                "second ": spread(of["mean_accuracy_second"]),
                "effective heads (accuracy, zeroed)": span(of["zero_accuracy_effective_heads"].round()),
                "(loss, mean)": span(of["mean_loss_effective_heads"].round()),
                "one necessary head": f"{int(one_necessary(of).sum())} of {len(of)}",
                "rotating heads that suffice": span(of["rotation_heads"]),
                "attending heads that suffice": span(of["attention_heads"]),
            }
        )
    return pd.DataFrame(rows)


def markdown(table: pd.DataFrame) -> str:
    lines = [list(table.columns), ["---"] * table.shape[1], *table.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(str(x).strip() for x in line)} |" for line in lines).replace(" --- ", "---")


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
        for number, name in enumerate(FIRST):
            rows = table[(table["encoding"] == name) & (table["size"] == "medium")]
            marker = {"symbol": rows["gaps"].map(symbols), "color": HUES[number], "size": 9}
            style = {"name": NAMES[name], "legendgroup": name, "showlegend": column == 1}
            figure.add_scatter(
                x=rows["loss"], y=rows[measure], mode="markers", marker=marker, row=1, col=column, **style
            )
    return figure.update_xaxes(type="log", title="loss after training (nats)")


def displaced(folder: Path) -> pd.DataFrame:
    """Principal angles, in degrees, of the four leading positional directions before layer 0 and each later layer, of
    the models in the folder; those of other models as they were."""
    rows: list[dict[str, Any]] = []
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
    both = pd.concat([pd.DataFrame(rows).round(2), pd.read_csv(ANGLES)])
    key = ["encoding", "task", "seed", "model", "layer"]
    return both.drop_duplicates(key).sort_values(key, ignore_index=True)


def main(folder: Path, minutes: float, chosen: list[tuple[str, str, int, int]]) -> None:
    torch.set_num_threads(1)
    start = time.monotonic()
    for key in chosen:
        if (finished()[KEY] == list(key)).all(axis=1).any():
            continue
        if time.monotonic() - start > 60 * minutes:
            break
        row = cell(*key, folder)
        add(row)
        print("{encoding}, {gaps} gaps, seed {seed}: accuracy {accuracy:.3f}".format(**row), flush=True)


if __name__ == "__main__":
    where, words = Path(sys.argv[1]), sys.argv[2:]
    if words == ["finish"]:
        from make import save

        save(draw(finished()), "deposit_96_heads", 960, 360, None)
        displaced(where).to_csv(ANGLES, index=False)
        print(markdown(summary(finished())))
    elif words == ["paper"]:
        main(where, math.inf, [("paper", name, 70, 0) for name in ("sinusoidal_rope", "rope")])
    else:
        main(where, float(words[0]) if words else math.inf, cells())
