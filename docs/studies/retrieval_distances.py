"""Do heads that retrieve need exact distances, or only that far keys look far?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from typing import Any

import pandas as pd
import torch
from shared.changes import Change, last_logits, row
from shared.retrieval import COUNT, PAIRS, last_heads, scored
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import needle_texts

GEMMA = {"lengths": (256,), "pairs": (8,), "seeds": (2,)}
ALONE = ("16 exact, others 16", "16 exact, others far")
SEVERAL = (*ALONE, "16 exact, others 64", "16 exact, others 16 to 31", "8 exact, others far", "4 exact, others far")


def table(
    model: Any,
    lengths: Sequence[int] = (256, 256, 512),
    pairs: Sequence[int] = (8, 8, 6),
    seeds: Sequence[int] = (2, 3, 2),
    count: int = COUNT,
) -> pd.DataFrame:
    """Answer minus decoy, by depth of the answer too: distances changed in the first heads by copying; in the first
    texts also in all heads, and in others of the same layers."""
    scores = scored(model, lengths[0], PAIRS)
    top = scores.top(count)
    sets = {"retrieval heads": {"heads": top}, "other heads": {"heads": last_heads(scores.heads, top)}, "all heads": {}}
    rows = list[dict[str, Any]]()
    for n, (length, size, seed) in enumerate(zip(lengths, pairs, seeds, strict=True)):
        needles = needle_texts(model, length=length, pairs=size, seed=seed)
        changes = [Change("unchanged", "", nan, [])]
        for where, heads in [*sets.items()][: 1 if n else 3]:
            names = ALONE if n or where != "retrieval heads" else SEVERAL
            changes += [Change(x, where, nan, tp.remap_distance(model, far_map(x, length - 1), **heads)) for x in names]
        for change in changes:
            logits = torch.cat([last_logits(model, text[None], change.hooks) for text in needles.tokens])
            values = needles.metric(logits).double().cpu()
            for depth in (nan, *needles.depths.unique().tolist()):
                at_depth = values.view(-1, 2).mean(1) if depth != depth else values[needles.depths == depth]
                rows.append(row(change, "", "", at_depth) | {"depth": depth, "length": length, "seed": seed})
    return pd.DataFrame(rows).drop(columns=["measure", "positions", "draw"])


def far_map(name: str, longest: int) -> Callable[[Tensor], Tensor]:
    """The map of distances that a name stands for. Others than the exact ones become one distance (``far``: that of the
    first token from the last) or keep their order, but near."""
    exact, others = name.split(" exact, others ")
    if others == "16 to 31":
        return partial(compressed, exact=int(exact), longest=longest)
    return partial(equal, exact=int(exact), far=longest if others == "far" else int(others))


def equal(d: Tensor, exact: int, far: int) -> Tensor:
    return torch.where(d > exact, far, d)


def compressed(d: Tensor, exact: int, longest: int) -> Tensor:
    return torch.where(d > exact, exact + (d - exact) * (exact - 1) / (longest - exact), d)
