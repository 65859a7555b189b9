"""Where do heads of random weights lie in the where–what plane?"""

from __future__ import annotations

from typing import Any

import pandas as pd
from shared.texts import demo_texts, parts

import tl_posdisent as tp

QUANTILES = (0.05, 0.5, 0.95)


def table(model: Any, texts: int = 4, length: int = 96, seeds: int = 2) -> pd.DataFrame:
    """One row for the trained model and for each copy with random and with shuffled weights: quantiles of the parts
    over the heads that contribute 0.0005 nats or more, and the number of heads with each verdict."""
    tokens = parts(model, "speeches", texts, length) if model.cfg.d_vocab > 10_000 else demo_texts(texts, length)
    rows = [{"weights": "trained"} | measured(model, tokens)]
    copies = {f"random, {std:.4f}": {"std": std} for std in (0.02, 1 / 24, 0.1)}
    copies |= {"shuffled": {"weights": "shuffled"}}
    for name, options in copies.items():
        for copy in tp.random_control(model, seeds, **options):
            rows.append({"weights": name} | measured(copy, tokens))
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def measured(model: Any, tokens: Any) -> dict[str, Any]:
    """The parts and verdicts of all heads, estimated."""
    heads = tp.where_or_what(model, tokens, exact=0, progress=False)
    used = heads[heads["contribution"] >= 0.0005]
    row: dict[str, Any] = {"texts": len(tokens), "length": tokens.shape[1], "heads": len(heads), "used": len(used)}
    row["contribution"] = heads["contribution"].median()
    for name in ("where_part", "what_part", "neither_part"):
        for quantile in QUANTILES:
            row[f"{name}_{quantile:.2f}"] = used[name].quantile(quantile)
    return row | {str(verdict): int(n) for verdict, n in heads["verdict"].value_counts().items()}
