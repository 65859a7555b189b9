"""How much text is enough until heads keep their order on another text?"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from shared.speeches import three_parts
from shared.two_measurements import LENGTH, TEXTS, additivity, column, compared, means
from torch import Tensor

ORDERS = {"r_held_out": 2}  # of the texts, drawn at random; else eight


def table(model: Any, of: int = TEXTS) -> pd.DataFrame:
    """One row per measure and number of texts: the error of a mean over so many, and how well two of them rank heads.

    Texts of 128 tokens in random orders are divided into sets of n. ``error`` is the root mean square difference of two
    sets, over heads and pairs of sets, divided by √2; ``spread`` the standard deviation over heads of the mean of all
    texts; ``rank`` the rank correlation of two sets, mean over pairs.
    """
    texts = three_parts(model)[:of, :LENGTH]
    by_measure = {name: torch.stack(rows) for name, rows in by_text(model, texts).items()}
    generator, rows = torch.Generator().manual_seed(0), []
    orders = [torch.randperm(of, generator=generator) for _ in range(8)]
    for n in (1, 2, 4, 8)[: of.bit_length() - 1]:
        sets = {name: torch.cat([means(x[order], n) for order in orders]) for name, x in by_measure.items()}
        if n > 1:  # the profile is that of the other texts of a set
            parts = torch.cat([texts[order].view(-1, n, texts.shape[1]) for order in orders[: ORDERS["r_held_out"]]])
            sets["r_held_out"] = torch.stack([column(additivity(model, x), "r_held_out") for x in parts])
        rows += [{"measure": name, "texts": n, "tokens": n * texts.shape[1], **compared(x)} for name, x in sets.items()]
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def by_text(model: Any, texts: Tensor) -> dict[str, list[Tensor]]:
    """For each text a number per head."""
    return {"r": [column(additivity(model, text), "r") for text in texts[:, None]]}
