"""What do prose, copies and needles lose without the heads that retrieve needles?"""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from typing import Any

import pandas as pd
from shared.changes import Change, Head, losses, row
from shared.retrieval import COUNT, LENGTH, PAIRS, answers, random_heads, scored
from shared.speeches import copies, second_parts
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import needle_texts


def table(
    model: Any, texts: int = 4, draws: int = 3, count: int = COUNT, pairs: int = PAIRS, length: int = LENGTH
) -> pd.DataFrame:
    """What prose, the second copy of random tokens and needles lose without heads (``losing``)."""
    scores, labels = scored(model, length, pairs), tp.head_labels(model, seeds=0, progress=False)
    top, induction = scores.top(count), labels.set_index(["layer", "head"])["induction"]
    needles, copied = needle_texts(model, length=length, pairs=pairs, seed=1), (length - 1) // 2
    kinds = {
        "prose": (second_parts(model, texts, length), 1),
        "second copy": (copies(model, texts, copied), copied + 2),
    }
    rows = list[dict[str, Any]]()
    for kind, (tokens, first) in kinds.items():
        base = losses(model, tokens)[:, first - 1 :].mean(1)
        rows.append(row(Change("none", "", nan, []), kind, f"from {first} on", base))
        for change in losing(model, top, induction, draws, tokens[:2]):
            added = losses(model, tokens, change.hooks)[:, first - 1 :].mean(1) - base
            rows.append(row(change, kind, f"from {first} on", added))
    for change in losing(model, top, induction, 0, needles.tokens[:4]):
        values = answers(model, needles, change.hooks).view(-1, 2).mean(1)
        rows.append(row(change, "needles", "last", values))
    return pd.DataFrame(rows).rename(columns={"change": "ablated", "where": "heads"})


def losing(model: Any, top: list[Head], induction: pd.Series, draws: int, reference: Tensor) -> Iterator[Change]:
    """Mean ablation of the first heads; the first alone; as many of most induction attention; those of the first that
    are among these, and the others; and random ones of the layers of the first."""
    most = induction.nlargest(len(top)).index.tolist()
    sets = {"first heads": top, "first head": top[:1], "most induction": most}
    sets["first heads, most induction"] = [head for head in top if head in most]
    sets["first heads, others"] = [head for head in top if head not in most]
    sets |= {f"random heads #{seed}": random_heads([*induction.index], top, seed) for seed in range(draws)}
    for name, heads in sets.items():
        if heads:
            where = " ".join(f"L{layer}H{head}" for layer, head in heads)
            hooks = tp.ablate_heads(model, heads, mode="mean", reference=reference)
            yield Change(name.partition(" #")[0], where, float(name.partition(" #")[2] or nan), hooks)
