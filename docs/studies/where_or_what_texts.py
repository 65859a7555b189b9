"""Are the parts of contributions, and the verdicts, the same on other texts and lengths?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from shared.texts import Source, demo_texts, parts

import tl_posdisent as tp

SOURCES: tuple[Source, ...] = ("speeches", "wikitext")
LENGTHS = (48, 96, 192)
GEMMA = {"texts": 6, "lengths": (96,)}


def table(model: Any, texts: int = 12, lengths: Sequence[int] = LENGTHS) -> pd.DataFrame:
    """One row for each source and length: the parts of the sum, the heads and the contributions of each verdict; and
    how the two halves of the texts agree, each measured alone, by estimates."""
    rows, small = [], model.cfg.d_vocab < 10_000
    for source in SOURCES[: 1 if small else None]:
        for length in lengths:
            tokens = demo_texts(texts, length) if small else parts(model, source, texts, length)
            heads = tp.where_or_what(model, tokens, progress=False)
            halves = [tp.where_or_what(model, half, exact=0, progress=False) for half in (tokens[::2], tokens[1::2])]
            row = {"source": "demo" if small else source, "texts": len(tokens), "length": length}
            rows.append(row | decided(heads) | agreement(*halves))
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def decided(heads: pd.DataFrame) -> dict[str, Any]:
    """The parts of the sum with their errors, and the heads of each verdict with their share of the sum."""
    shares = heads.groupby("verdict")["contribution"].sum() / heads["contribution"].sum()
    counts = {f"{verdict} heads": int(n) for verdict, n in heads["verdict"].value_counts().items()}
    return heads.attrs["parts"] | counts | {f"{verdict} share": share for verdict, share in shares.items()}


def agreement(one: pd.DataFrame, other: pd.DataFrame) -> dict[str, Any]:
    """Of the heads that are used in both: rank correlations of the parts; how many are decided in both, how many of
    these otherwise, and how many are *where* in one and *what* in the other."""
    used = (one["verdict"] != "not used") & (other["verdict"] != "not used")
    both = used & (one["verdict"] != "undecided") & (other["verdict"] != "undecided")
    otherwise, sides = both & (one["verdict"] != other["verdict"]), {"where", "what"}
    opposite = otherwise & one["verdict"].isin(sides) & other["verdict"].isin(sides)
    ranks = {
        f"rank of {name}": one.loc[used, name].corr(other.loc[used, name], method="spearman")
        for name in ("where_part", "what_part", "neither_part")
    }
    counts = {"decided in both": both, "otherwise": otherwise, "opposite": opposite}
    return ranks | {name: int(rows.sum()) for name, rows in counts.items()}
