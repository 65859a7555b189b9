"""Are the where–what plane and its verdicts the same on other texts?"""

from __future__ import annotations

from typing import Any

import pandas as pd
from shared.texts import demo_texts, parts
from torch import Tensor

import tl_posdisent as tp


def table(model: Any, texts: int = 4, length: int = 96) -> pd.DataFrame:
    """One row per comparison of two tables of all heads, estimated: of two sets of texts, each with fits to the other
    set; and of one set with fits to the other set and to itself."""
    small = model.cfg.d_vocab < 10_000
    both = demo_texts(2 * texts, length) if small else parts(model, "speeches", 2 * texts, length)
    one, other = both[::2], both[1::2]
    tables = measured(model, other, one), measured(model, one, other), measured(model, one, one)
    pairs = {"two sets": (tables[0], tables[1]), "fitted to the same texts": (tables[0], tables[2])}
    sizes = {"texts": texts, "length": length}
    return pd.DataFrame([{"compared": name} | sizes | compared(*pair) for name, pair in pairs.items()])


def measured(model: Any, fitted: Tensor, texts: Tensor) -> pd.DataFrame:
    return tp.where_or_what(model, fitted, texts, exact=0, progress=False)


def compared(one: pd.DataFrame, other: pd.DataFrame) -> dict[str, Any]:
    """Of the heads that contribute 0.0005 nats or more in both: rank correlations, the share of heads in the same half,
    differences, also in standard errors; and of all heads, how often two decided verdicts differ."""
    used = (one["contribution"] >= 0.0005) & (other["contribution"] >= 0.0005)
    row: dict[str, Any] = {"used": int(used.sum())}
    for name in ("where", "what"):
        a, b = (x.loc[used, f"{name}_unclipped"] for x in (one, other))
        error = (one[f"{name}_se"] ** 2 + other[f"{name}_se"] ** 2)[used] ** 0.5
        row[f"rank_{name}"] = a.corr(b, method="spearman")
        row[f"same_half_{name}"] = ((a > 0.5) == (b > 0.5)).mean()
        row |= {f"difference_{name}": (b - a).median(), f"size_{name}": (b - a).abs().median()}
        row[f"size_in_errors_{name}"] = ((b - a) / error).abs().median() / 0.6745  # of a normal deviate: 1
    decided = (one["verdict"] != "undecided") & (other["verdict"] != "undecided")
    row |= {"undecided_one": int((one["verdict"] == "undecided").sum()), "decided_in_both": int(decided.sum())}
    return row | {"otherwise": int((decided & (one["verdict"] != other["verdict"])).sum())}
