"""What does a model lose without RoPE's rotation, before any training? By layer and head, on prose and on copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
from shared.changes import BY_LENGTH, EDGES, Change, by_layers, globals_of, losses, of_heads, of_layers, row
from shared.speeches import COPY, copies, second_parts
from torch import Tensor

import tl_posdisent as tp

SKIPPED = 256  # tokens of the beginnings of speeches, many of which are alike
GEMMA = {"length": 128, "draws": 2, "edges": (1, 64, 256, 512), "single": 0}  # it takes twice as long


def by_heads(model: Any, draws: int, skip: int) -> Iterator[Change]:
    """The heads with most attention to the previous token, on two other speeches, and those with most induction
    attention; and as many others, of the same layers if they have enough."""
    labels = tp.head_labels(model, second_parts(model, 2, SKIPPED // 2, skip), seeds=0, progress=False)
    labels = labels.set_index(["layer", "head"])
    size = max(len(labels) // 18, 1)
    for label in ("previous_token", "induction"):
        chosen = labels[label].nlargest(size).index.tolist()
        yield of_heads(model, f"heads, most {label}", chosen)
        layers = {layer for layer, _ in chosen}
        others = [head for head in labels.index if head not in chosen]
        for seed in range(draws):
            order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed)).tolist()
            drawn = sorted((others[x] for x in order), key=lambda head: head[0] not in layers)[:size]
            yield of_heads(model, f"random heads of the layers with most {label}", drawn, seed)


def table(
    model: Any,
    texts: int = 4,
    draws: int = 4,
    every: int = 4,
    length: int = SKIPPED,
    edges: Sequence[int] = EDGES,
    single: int = 2,
    global_layers: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Loss added by each change, in nats per token: of prose, and of the second copy of random tokens. Loss by position
    of the model itself and of some changes. ``single``: texts for single layers."""
    if global_layers is None:
        global_layers = globals_of(model)
    long, twice, rows = second_parts(model, texts, edges[-1]), copies(model, texts), list[dict[str, Any]]()
    prose = long[:, :length]
    positions = {"prose": f"1 to {length}", "second copy": f"{COPY + 2} to {2 * COPY + 1}"}

    def measured(hooks: Sequence[Any], n: int) -> dict[str, Tensor]:
        second = losses(model, twice[:n], hooks)[:, COPY + 1 :]
        return {"prose": losses(model, prose[:n], hooks).mean(1), "second copy": second.mean(1)}

    unchanged = Change("unchanged", "", torch.nan, [])
    base = measured([], texts)
    rows += [row(unchanged, measure, positions[measure], values) for measure, values in base.items()]
    changes = [*by_layers(model, every, draws, global_layers), *by_heads(model, draws, texts)]
    changes.append(Change("distances plus 4", "all", torch.nan, tp.remap_distance(model, lambda d: d + 4)))
    changes += [of_layers(model, "one layer", [layer]) for layer in range(model.cfg.n_layers if single else 0)]
    for change in changes:
        n = single if change.name == "one layer" else texts
        for name, values in measured(change.hooks, n).items():
            rows.append(row(change, name, positions[name], values - base[name][:n]))
    base = losses(model, long)
    for change in (unchanged, *(each for each in changes if each.name in BY_LENGTH)):
        values = losses(model, long, change.hooks) - base if change.hooks else base
        for start, stop in pairwise(edges):
            rows.append(row(change, "prose by position", f"{start} to {stop}", values[:, start - 1 : stop - 1].mean(1)))
    return pd.DataFrame(rows)
