"""The tables of the page on the deposit, of models with 96 heads."""

from __future__ import annotations

import math

import pandas as pd
from shared.deposits import HEADS, NAMES, markdown, one_necessary, span, spread
from shared.rows import TABLES


def by_distances(table: pd.DataFrame) -> pd.DataFrame:
    """How many models with all heads rotary have one necessary head, by number of distances."""
    table = table[table["rotary_heads"] == HEADS]
    counts = {
        f"{measure}, {word}": one_necessary(table, mode, measure).astype(int)
        for measure in ("accuracy", "loss")
        for mode, word in (("zero", "zeroed"), ("mean", "mean"))
    }
    labels = table["task"].str.extract(r"gap(\d+)", expand=False).astype(float).fillna(1000)
    counted = pd.DataFrame({"models": 1, **counts}).groupby(labels).sum()
    counted.loc[math.inf] = counted.sum()
    counted.insert(0, "distances", [*(str(int(n)) for n in counted.index[:-2]), "70, the paper's size", "all"])
    return counted


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row per task and encoding, over seeds: rotation in all heads or in none, 16 distances and the paper's size."""
    table = table[table["encoding"].isin(NAMES) & table["rotary_heads"].isin([0, HEADS])]
    table = table.assign(order=table["encoding"].map({name: number for number, name in enumerate(NAMES)}))
    table["labels"] = table["task"].str.extract(r"gap(\d+)", expand=False).astype(float).fillna(1000).astype(int)
    rows = []
    for (_, labels, _), of in table.groupby(["size", "labels", "order"]):
        necessary = [str(int(one_necessary(of, mode).sum())) for mode in ("zero", "mean")]
        rows.append(
            {
                "distances": str(labels) if labels < 1000 else "70, the paper's size",
                "encoding": NAMES[of["encoding"].iloc[0]],
                "seeds": str(len(of)),
                "accuracy": spread(of["accuracy"]),
                "largest drop, zeroed": spread(of["zero_accuracy_drop"]),
                "mean": spread(of["mean_accuracy_drop"]),
                "one necessary head": " and ".join(necessary),
                "rotating heads that suffice": span(of["rotation_heads"]),
            }
        )
    every = pd.DataFrame(rows)
    return every[every["distances"].isin(["16", "70, the paper's size"])]


def main() -> None:
    """Print them."""
    table = pd.read_csv(TABLES / "deposit_96_heads.csv").query("task != 'count'")
    print(markdown(summary(table)), markdown(by_distances(table)), sep="\n\n")
