"""Findings about attention scores: how additive they are, and beside which baselines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from rows import Row, row
from texts import Source, parts

import tl_posdisent as tp
from tl_posdisent.models import read_model
from tl_posdisent.rope import rope_capacity

TEXTS, LENGTH = 8, 256
SHARES = ["distance", "query", "key", "query:key", "distance:query:key"]
STUDIES = ("additive", "controlled", "far_shares", "subspaces", "capacity")


def by_text(table: pd.DataFrame, column: str) -> torch.Tensor:
    """``[text]``: the mean of a column over heads."""
    return torch.tensor(table.groupby("batch")[column].mean().to_numpy())


def additive(model: Any, source: Source) -> Iterator[Row]:
    """r of each text's own scores, of random projections, and of one copy with random weights of each kind."""
    texts = parts(model, source, TEXTS, LENGTH)
    beside = tp.additivity(model, texts, controls=["random queries and keys"], progress=False)
    tables = {name.replace("own", "trained"): table for name, table in beside.groupby("scores", sort=False)}
    for kind in ("random", "shuffled"):
        copy = next(tp.random_control(model, [0], weights=kind))  # type: ignore[arg-type]
        tables[kind] = tp.additivity(copy, texts, progress=False)
    for column in ("r_held_out", "r", "r_no_distance"):
        for name, table in tables.items():
            yield row(f"{column}, {name}", by_text(table, column), LENGTH, f'additivity(model, texts)["{column}"]')
    layers = {name: table.groupby("layer")["r_held_out"].mean() for name, table in tables.items()}
    above = sum((layers["trained"] > layers[name]).to_numpy() for name in ("random", "shuffled")) == 2
    over = f"{len(above)} layers"
    yield Row("share of layers above both copies", above.mean(), torch.nan, over, LENGTH, "r_held_out")


def copies(model: Any) -> dict[str, Any]:
    """The model, and a copy with random weights: of the configuration's standard deviation, and of 0.02."""
    random, small = (next(tp.random_control(model, [0], std=std)) for std in ("config", 0.02))
    return {"trained": model, "random": random, "random of 0.02": small}


def controlled(model: Any, source: Source) -> Iterator[Row]:
    """r and shares of the variance at controlled distances, trained and of random copies; the lowest layers."""
    texts = parts(model, source, TEXTS, LENGTH)
    for name, one in copies(model).items():
        by_batch = [
            tp.controlled_distance(one, text[None], progress=False).assign(batch=n) for n, text in enumerate(texts)
        ]
        table = pd.concat(by_batch)
        for column in ("r_three_axis", "r_two_axis", *SHARES):
            call = f'controlled_distance(model, text)["{column}"]'
            yield row(f"{column}, {name}", by_text(table, column), LENGTH, call)
        lowest = table.groupby(["layer", "batch"])["r_three_axis"].mean().unstack()
        worst = lowest.loc[lowest.mean(axis=1).idxmin()]
        yield row(f"r_three_axis, lowest layer, {name}", torch.tensor(worst.to_numpy()), LENGTH, f"layer {worst.name}")
        heads = table.groupby(["layer", "head"])["r_three_axis"].mean()
        share, over = float((heads > 0.9).mean()), f"{len(heads)} heads"
        name = f"share of heads with r_three_axis above .9, {name}"
        yield Row(name, share, torch.nan, over, LENGTH, 'controlled_distance(model, text)["r_three_axis"]')


RANGES = ((0, 256), (256, 512), (1024, 1280), (3840, 4096))


def far_shares(model: Any, source: Source) -> Iterator[Row]:
    """What the scores depend on among near and among far keys: shares of the variance over ranges of equal width. Only
    of models whose layers all see far keys."""
    if "local" in set(read_model(model).to_frame()["attention"]):
        return
    texts = parts(model, source, 4, LENGTH)
    for name, one in list(copies(model).items())[:2]:
        for start, stop in RANGES:
            options: dict[str, Any] = {"distances": range(start, stop), "sinks": 1, "progress": False}
            tables = [tp.controlled_distance(one, text[None], **options)[SHARES].mean() for text in texts]
            for share in SHARES:
                values = torch.tensor([table[share] for table in tables])
                what = f"share of {share}, distances {start} to {stop - 1}, {name}"
                yield row(what, values, LENGTH, "controlled_distance(model, text, distances=…)")


def subspaces(model: Any, source: Source) -> Iterator[Row]:
    """Observation 1 of [A]: concentration of keys, and shares of a head's variance, by band of wavelengths."""
    texts = parts(model, source, 4, LENGTH)
    for name, one in {"trained": model, "random": next(tp.random_control(model, [0]))}.items():
        tables = [_by_band(one, text) for text in texts]
        for band in tables[0].index:
            for column in ("key_concentration", "distance", "semantic", "content", "size"):
                values = torch.tensor([table.loc[band, column] for table in tables])
                yield row(f"{column}, wavelengths {band}, {name}", values, LENGTH, "subspace_patterns(model, text)")
    for band, share in tables[0]["subspaces"].items():
        yield Row(f"share of subspaces, wavelengths {band}", share, torch.nan, "", LENGTH, "subspace_patterns")


BANDS = {"below 16": 16.0, "16 to 256": 256.0, "256 to 4096": 4096.0, "above 4096": float("inf")}


def _by_band(model: Any, text: torch.Tensor) -> pd.DataFrame:
    """Means over heads: the concentration within a band, and the sums over its subspaces of shares of the variance, of
    mean |q| · mean |k|, and of the number of subspaces; the band's share of the content's variance."""
    table = tp.subspace_patterns(model, text[None], sinks=8, progress=False)
    table["band"] = pd.cut(table["wavelength"], [0.0, *BANDS.values()], labels=list(BANDS))
    of_head = table.groupby(["layer", "head"])
    table["size"] = table["query_size"] * table["key_size"]
    table["size"] /= of_head["size"].transform("sum")
    table["subspaces"] = 1 / of_head["subspace"].transform("size")
    heads = table.groupby(["layer", "head", "band"], observed=True)
    shares = heads[["distance", "semantic", "size", "subspaces"]].sum().join(heads["key_concentration"].mean())
    means = shares.groupby("band", observed=True).mean()
    return means.assign(content=means["semantic"] / means["semantic"].sum())


def capacity(model: Any, source: Source) -> Iterator[Row]:
    """r² of the best function of 450 distances that the rotary frequencies of the first layer give, with a ridge."""
    rotary = read_model(model).specs([0])[0].require_rotary("capacity")
    d = torch.arange(450.0, dtype=torch.float64)
    for name, target in {"-log(1 + d)": -torch.log1p(d), "d < 64": d < 64, "d < 8": d < 8, "d = 1": d == 1}.items():
        fit = rope_capacity(rotary, d, target.double(), ridge=1e-3, intercept=True)
        yield Row(
            f"r2 of {name}", fit.r2, torch.nan, "450 distances", 450, "rope_capacity(rotary, d, target, ridge=1e-3)"
        )
