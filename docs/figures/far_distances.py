"""Studies of ``real_models.py``: do far distances have to be exact, or only far? Distances up to a limit stay exact;
all others become one distance, near (16) or far (64 and more), or keep their order between 16 and 31."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import nan
from typing import Any

import pandas as pd
import torch
from retrieval import COUNT, PAIRS, last_heads, scored
from torch import Tensor
from without_rotation import EDGES, Change, copies, last_logits, losses, of_layers, row, speeches

import tl_posdisent as tp
from tl_posdisent.experiments import needle_texts

COPIED = 127  # tokens of each copy
ALONE = ("16 exact, others 16", "16 exact, others far")
SEVERAL = (*ALONE, "16 exact, others 64", "16 exact, others 16 to 31", "8 exact, others far", "4 exact, others far")


def equal(d: Tensor, exact: int, far: int) -> Tensor:
    """One distance for all beyond a limit."""
    return torch.where(d > exact, far, d)


def compressed(d: Tensor, exact: int, longest: int) -> Tensor:
    """Distances beyond a limit in their order, but all of them near."""
    return torch.where(d > exact, exact + (d - exact) * (exact - 1) / (longest - exact), d)


def far_map(name: str, longest: int) -> Callable[..., Tensor]:
    """The map of distances that a name stands for: others than the exact ones become one distance (``far``: that of the
    first token from the last), or are compressed."""
    exact, others = name.split(" exact, others ")
    if others == "16 to 31":
        return partial(compressed, exact=int(exact), longest=longest)
    return partial(equal, exact=int(exact), far=longest if others == "far" else int(others))


def far_distances(
    model: Any, texts: int = 4, edges: Sequence[int] = EDGES, far: Sequence[int] = (16, 64, 255), copied: int = COPIED
) -> pd.DataFrame:
    """Loss by position, and of the second copy of random tokens; added loss of each change."""
    kinds = {"second copy": copies(model, texts, copied), "prose": speeches(model, texts, edges[-1])}
    changes = [Change("unchanged", "", nan, [])]
    for name in (f"16 exact, others {n}" for n in far):
        changes.append(Change(name, "", nan, tp.remap_distance(model, far_map(name, edges[-1] - 1))))
    changes.append(of_layers(model, "no rotation", range(model.cfg.n_layers)))
    rows, base = list[dict[str, Any]](), dict[str, Tensor]()
    for kind, tokens in kinds.items():
        places = [*pairwise(edges)] if kind == "prose" else [(copied + 2, 2 * copied + 1)]
        for change in changes:
            values = losses(model, tokens, change.hooks)
            values = values - base.setdefault(kind, values) if change.hooks else base.setdefault(kind, values)
            for start, stop in places:
                rows.append(row(change, kind, f"{start} to {stop}", values[:, start - 1 : stop - 1].mean(1)))
                print(*rows[-1].values(), flush=True)
    return pd.DataFrame(rows).drop(columns=["where", "draw"])


def retrieval_distances(
    model: Any,
    lengths: Sequence[int] = (256, 256, 512),
    pairs: Sequence[int] = (8, 8, 6),
    seeds: Sequence[int] = (2, 3, 2),
    count: int = COUNT,
) -> pd.DataFrame:
    """Answer minus decoy, by depth of the answer too: distances changed in the first heads by copying; in the first
    texts also in all heads, and in others of the same layers."""
    found = scored(model, lengths[0], PAIRS)
    top = found.top(count)
    sets = {"retrieval heads": {"heads": top}, "other heads": {"heads": last_heads(found.heads, top)}, "all heads": {}}
    rows = list[dict[str, Any]]()
    for n, (length, size, seed) in enumerate(zip(lengths, pairs, seeds, strict=True)):
        needles = needle_texts(model, length=length, pairs=size, seed=seed)
        changes = [Change("unchanged", "", nan, [])]
        for where, heads in [*sets.items()][: 1 if n else 3]:
            some = ALONE if n or where != "retrieval heads" else SEVERAL
            changes += [Change(x, where, nan, tp.remap_distance(model, far_map(x, length - 1), **heads)) for x in some]
        for change in changes:
            logits = torch.cat([last_logits(model, text[None], change) for text in needles.tokens])
            values = needles.metric(logits).double().cpu()
            for depth in (nan, *needles.depths.unique().tolist()):
                at_depth = values.view(-1, 2).mean(1) if depth != depth else values[needles.depths == depth]
                rows.append(row(change, "", "", at_depth) | {"depth": depth, "length": length, "seed": seed})
            print(*rows[-len(needles.depths.unique()) - 1].values(), flush=True)
    return pd.DataFrame(rows).drop(columns=["measure", "positions", "draw"])
