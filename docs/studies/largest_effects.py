"""Does ``head_effects`` run the heads of largest effect?"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

import tl_posdisent as tp
from tl_posdisent.demo.demo_model import demo_text


def table(model: Any, texts: int = 2, length: int = 96) -> pd.DataFrame:
    """The heads that ``head_effects`` runs beside runs of all heads, for four interventions: the largest divergence,
    how many of the 4 and of the 8 largest were run, the cost, and what was left; half an hour. Texts: parts of the
    beginning of the demo text, each behind its BOS."""
    ids, rest = model.to_tokens(demo_text())[0], length - 1
    tokens = torch.stack([torch.cat([ids[:1], ids[1 + n * rest : 1 + (n + 1) * rest]]) for n in range(texts)])
    interventions = {
        "distances halved": tp.remap_distance(model, lambda d: d / 2),
        "every distance 5": tp.dummy_distance(model, 5),
        "distances at most 16": tp.remap_distance(model, lambda d: d.clamp(max=16)),
        "zero": tp.ablate_heads(model, None),
    }
    rows = []
    for name, hooks in interventions.items():  # one by one, so that passes are those of one
        options: dict[str, Any] = {"interventions": {name: hooks}, "draws": 4, "progress": False}
        table, whole = (tp.head_effects(model, tokens, exact=exact, **options) for exact in (4, "all"))
        kl, run, search = whole["kl"], table["kl"].notna(), table.attrs["runs"][name]
        found = {f"found_of_{n}": run[kl.nlargest(n).index].sum() for n in (4, 8)}
        row = whole.loc[kl.idxmax()]
        largest = {"layer": int(row["layer"]), "head": int(row["head"]), "kl": row["kl"], "curvature": row["curvature"]}
        cost = {"run": search["run"], "passes": round(table.attrs["passes"], 1)}
        left = {"bound": search["bound"], "largest_not_run": kl[~run].max()}
        ranks = whole[["curvature", "kl", "first", "exact"]].abs().rank()
        correlations = {f"{a}_{b}": ranks[a].corr(ranks[b]) for a, b in (("curvature", "kl"), ("first", "exact"))}
        rows.append({"intervention": name} | largest | found | cost | left | correlations)
        print(rows[-1], flush=True)
    return pd.DataFrame(rows).round(5)
