"""Train and measure models of six layers of 16 heads, those of the ``medium`` preset and two of the paper's size:
necessity and sufficiency of heads, cell by cell.

``python docs/figures/deposit_96_heads.py FOLDER [minutes]`` trains and measures cells (size, task, encoding, rotary
heads in each layer, seed) in one thread, the most informative ones first, until all are done or the time is up. Each
finished cell is a row of ``deposit_96_heads.csv`` beside this script, the numbers of the page on the deposit; what has
a row is not trained again, and a cell that is stopped begins again, once its folder in FOLDER is deleted. ``… FOLDER
few`` trains the models with one and two rotary heads in each layer, ``… FOLDER paper`` those of the paper's size. ``…
FOLDER finish`` prints the page's table, and compares the positional subspaces of the models that were trained into the
folder (``displaced_subspace.csv``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import resumed
import torch

from tl_posdisent.experiments import positional_subspace
from tl_posdisent.rope import principal_angles
from tl_posdisent.synthetic import (
    SyntheticModel,
    TrainRun,
    deposit,
    head_drops,
    load_checkpoint,
    preset,
    sufficient_heads,
    train_preset,
)

TABLE = Path(__file__).with_name("deposit_96_heads.csv")
ANGLES = Path(__file__).with_name("displaced_subspace.csv")
MEDIUM, PAPER = preset("medium"), preset("paper")
# The published shape and task, in smaller batches with a larger learning rate.
ON_A_CPU = replace(PAPER.training, batch_size=48, lr=5e-4, betas=(0.9, 0.98), epochs=1, n_test=1_000)
STEPS = {("distance", "sinusoidal_rope"): 1200, ("distance", "rope"): 2000, ("count", "sinusoidal_rope"): 900}
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
ROTATING = ("rope", "sinusoidal_rope")
HEADS = 16
KEY = ["size", "task", "encoding", "rotary_heads", "seed"]
Cell = tuple[str, str, str, int, int]


def cell(size: str, task: str, encoding: str, seed: int = 0) -> Cell:
    """Name a model of which all heads rotate, if the encoding does."""
    return size, task, encoding, HEADS * (encoding in ROTATING), seed


def cells() -> list[Cell]:
    """Every encoding on 16 gaps, then more seeds and other gaps of three, then the rest."""
    others = range(1, 5)
    parts: list[tuple[int, tuple[str, ...], Sequence[int]]] = [(16, MEDIUM.encodings, [0]), (16, FIRST, others)]
    parts += [(32, FIRST, [0]), (8, FIRST, others), (32, FIRST, others), (70, FIRST, [0])]
    parts += [(n, MEDIUM.encodings, range(5)) for n in (8, 16, 32, 70)]
    every = [cell("medium", f"gap{n}", name, seed) for n, names, seeds in parts for seed in seeds for name in names]
    return list(dict.fromkeys(every))


def few() -> list[Cell]:
    """One and two rotary heads in each layer, on 16 gaps."""
    return [
        ("medium", "gap16", name, heads, seed) for seed in range(3) for name in reversed(ROTATING) for heads in (1, 2)
    ]


def drops_of(model: SyntheticModel, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[dict[str, Any], pd.DataFrame]:
    """Drops of accuracy and loss, zeroed and mean-ablated, and the table of the latter."""
    found: dict[str, Any] = {}
    for mode in ("zero", "mean"):
        drops = head_drops(model, tokens, labels, mode=mode, progress=False)  # type: ignore[arg-type]
        for measure, name in (("metric", "accuracy"), ("loss", "loss")):
            report = deposit(drops, measure=measure)  # type: ignore[arg-type]
            row = report.to_frame().drop(columns=["layer", "head"]).iloc[0].to_dict()
            row |= {"layer": report.layer, "head": report.head}
            found |= {f"{mode}_{name}_{key}": value for key, value in row.items()}
    return found, drops


def measured(model: SyntheticModel, tokens: torch.Tensor, labels: torch.Tensor, *, attention: bool) -> dict[str, Any]:
    """Drops of accuracy and loss, and the sufficient sets (``attention``: of both kinds)."""
    found, drops = drops_of(model, tokens, labels)
    for by in [*["rotation"] * model.encoding.rotates, *["attention"] * attention]:
        sets = sufficient_heads(model, tokens, labels, by=by, order=drops)  # type: ignore[arg-type]
        one = sets.path.query("heads >= 1")["accuracy"].iloc[-1] if sets.heads else sets.none
        found |= {f"{by}_heads": len(sets.heads), f"{by}_none": sets.none, f"{by}_one": one}
        found |= {f"{by}_accuracy": sets.accuracy, f"{by}_set": " ".join(f"{n}.{h}" for n, h in sets.heads)}
    return found


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


def finished() -> pd.DataFrame:
    """All models of distances that were measured, one row each."""
    return resumed.finished(TABLE, KEY).query("task != 'count'")


def counting() -> pd.Series:
    """The model of the paper's size that counts triggers."""
    return resumed.finished(TABLE, KEY).query("task == 'count'").iloc[0]


def one_necessary(table: pd.DataFrame, mode: str, measure: str = "accuracy") -> pd.Series:
    """The models with one necessary head: without it (``"zero"``), or with its mean in its place (``"mean"``), accuracy
    falls (or the loss grows) by 0.1 or more, four times as far as for any other head."""
    largest, second = table[f"{mode}_{measure}_drop"], table[f"{mode}_{measure}_second"]
    return (largest >= 0.1) & (largest >= 4 * second)


def by_distances(table: pd.DataFrame) -> pd.DataFrame:
    """How many models with all heads rotary have one necessary head, by number of distances."""
    table = table[table["rotary_heads"] == HEADS]
    counts = {
        f"{measure}, {word}": one_necessary(table, mode, measure).astype(int)
        for measure in ("accuracy", "loss")
        for mode, word in (("zero", "zeroed"), ("mean", "mean"))
    }
    labels = table["task"].str.extract(r"gap(\d+)", expand=False).astype(float).fillna(1000)
    found = pd.DataFrame({"models": 1, **counts}).groupby(labels).sum()
    found.loc[math.inf] = found.sum()
    found.insert(0, "distances", [*(str(int(n)) for n in found.index[:-2]), "70, the paper's size", "all"])
    return found


def spread(values: pd.Series, digits: int = 2) -> str:
    """Mean and standard deviation over models; – where nothing was measured."""
    known = values.dropna()
    text = f"{known.mean():.{digits}f}" if len(known) else "–"
    return f"{text}±{known.std():.{digits}f}" if len(known) > 1 else text


def span(values: pd.Series) -> str:
    """The least and the greatest; – where nothing was measured."""
    known = sorted({int(x) for x in values.dropna()})
    return "–" if not known else str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A table with a row per task, encoding of ``FIRST`` and number of rotary heads, over seeds."""
    table = table[table["encoding"].isin(FIRST)]
    table = table.assign(order=table["encoding"].map({name: number for number, name in enumerate(NAMES)}))
    table["labels"] = table["task"].str.extract(r"gap(\d+)", expand=False).astype(float).fillna(1000).astype(int)
    rows = []
    for (_, labels, _, heads), of in table.groupby(["size", "labels", "order", "rotary_heads"]):
        necessary = [str(int(one_necessary(of, mode).sum())) for mode in ("zero", "mean")]
        rows.append(
            {
                "distances": str(labels) if labels < 1000 else "70, the paper's size",
                "encoding": NAMES[of["encoding"].iloc[0]] + f", {heads} of {HEADS} heads" * (0 < heads < HEADS),
                "seeds": str(len(of)),
                "accuracy": spread(of["accuracy"]),
                "largest drop, zeroed": spread(of["zero_accuracy_drop"]),
                "mean": spread(of["mean_accuracy_drop"]),
                "one necessary head": " and ".join(necessary),
                "rotating heads that suffice": span(of["rotation_heads"]),
            }
        )
    return pd.DataFrame(rows)


def on_the_page(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that the page shows: rotation in all heads or in none, 16 distances and the paper's size."""
    shown = summary(table[table["rotary_heads"].isin([0, HEADS])])
    return shown[shown["distances"].isin(["16", "70, the paper's size"])]


def markdown(table: pd.DataFrame) -> str:
    lines = [list(table.columns), ["---"] * table.shape[1], *table.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(str(x).strip() for x in line)} |" for line in lines).replace(" --- ", "---")


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


def main(folder: Path, minutes: float, chosen: list[Cell]) -> None:
    resumed.fill(TABLE, KEY, chosen, lambda key: row_of(key, folder), minutes)


if __name__ == "__main__":
    where, words = Path(sys.argv[1]), sys.argv[2:]
    if words == ["finish"]:
        displaced(where).to_csv(ANGLES, index=False)
        print(*(markdown(f(finished())) for f in (summary, on_the_page, by_distances)), sep="\n")
    elif words == ["paper"]:
        main(where, math.inf, [cell("paper", *key) for key in STEPS])
    elif words == ["few"]:
        main(where, math.inf, few())
    else:
        main(where, float(words[0]) if words else math.inf, cells())
