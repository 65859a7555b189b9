"""How additive are scores at controlled distances, trained and of random copies?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.texts import Source, parts

import tl_posdisent as tp

TEXTS, LENGTH = 8, 256
CALL = 'controlled_distance(model, text)["r_…_axis"]'


def rows(model: Any, source: Source) -> Iterator[Row]:
    """r at controlled distances, trained and of copies with random weights (of the configuration's standard deviation,
    and of 0.02); of the trained model also the lowest layer, and the share of heads above 0.9."""
    texts = parts(model, source, TEXTS, LENGTH)
    random, small = (next(tp.random_control(model, [0], std=std)) for std in ("config", 0.02))
    for name, one in {"trained": model, "random": random, "random of 0.02": small}.items():
        by_text = [tp.controlled_distance(one, text[None], progress=False) for text in texts]
        table = pd.concat(by_text, keys=range(len(by_text)), names=["text"])
        for column in ("r_three_axis", "r_two_axis"):
            values = torch.tensor(table.groupby("text")[column].mean().to_numpy())
            yield row(f"{column}, {name}", values, LENGTH, CALL)
        if name == "trained":
            by_layer = table.groupby(["layer", "text"])["r_three_axis"].mean().unstack()
            worst = by_layer.loc[by_layer.mean(axis=1).idxmin()]
            values = torch.tensor(worst.to_numpy())
            yield row("r_three_axis, lowest layer, trained", values, LENGTH, f"layer {worst.name}")
            heads = table.groupby(["layer", "head"])["r_three_axis"].mean()
            what, over = "share of heads with r_three_axis above .9, trained", f"{len(heads)} heads"
            yield Row(what, float((heads > 0.9).mean()), torch.nan, over, LENGTH, CALL)
