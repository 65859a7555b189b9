"""Does ``head_effects`` run the heads of largest effect?"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

import tl_posdisent as tp


def table(model: Any, texts: int = 2, length: int = 96) -> pd.DataFrame:
    """The heads that ``head_effects`` runs beside runs of all heads, for four interventions; a quarter of an hour.

    Texts: parts of the beginning of the demo text, each behind its BOS.
    """
    ids, rest = model.to_tokens(tp.demo_text())[0], length - 1
    tokens = torch.stack([torch.cat([ids[:1], ids[1 + n * rest : 1 + (n + 1) * rest]]) for n in range(texts)])
    interventions = {
        "distances halved": tp.remap_distance(model, lambda d: d / 2),
        "every distance 5": tp.dummy_distance(model, 5),
        "distances at most 16": tp.remap_distance(model, lambda d: d.clamp(max=16)),
        "zero": tp.ablate_heads(model, None),
    }
    effects = tp.head_effects(model, tokens, interventions, progress=False)
    whole = tp.head_effects(model, tokens, interventions, exact="all", draws=0, progress=False)
    print(f"{effects.attrs['passes']:.0f} passes for all interventions, {whole.attrs['passes']:.0f} for all heads")
    effects[["kl_of_all", "exact_of_all"]] = whole[["kl", "exact"]]
    by_name = effects.groupby("intervention", sort=False)
    rows = [{"intervention": name} | compared(x) | effects.attrs["runs"][name] for name, x in by_name]
    return pd.DataFrame(rows).drop(columns=["heads", "largest", "statement"]).round(5)


def compared(table: pd.DataFrame) -> dict[str, Any]:
    """The largest divergence of all heads, how many of the four largest were run, and rank correlations over heads."""
    kl, run = table["kl_of_all"], table["kl"].notna()
    largest = table.loc[kl.idxmax()]
    row = {"layer": int(largest["layer"]), "head": int(largest["head"]), "kl": kl.max()}
    row |= {"curvature": largest["curvature"], "found_of_4": int(run[kl.nlargest(4).index].sum())}
    ranks = table[["curvature", "kl_of_all", "first", "exact_of_all"]].abs().rank()
    row["curvature_kl"] = ranks["curvature"].corr(ranks["kl_of_all"])
    return row | {"first_exact": ranks["first"].corr(ranks["exact_of_all"])}
