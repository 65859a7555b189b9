"""Sets of heads that keep their distances: ranked by curvature, and found by a greedy search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import tl_posdisent as tp
from shared.rows import losses

Head = tuple[int, int]


def by_curvature(model: Any, texts: Tensor) -> list[Head]:
    """All heads, those first whose distance 5 changes predictions most by the estimate of ``head_effects``."""
    table = tp.head_effects(model, texts, {"5": tp.dummy_distance(model, 5)}, exact=0, draws=8, progress=False)
    table = table.sort_values("curvature", ascending=False)
    return [(int(layer), int(head)) for layer, head in table[["layer", "head"]].to_numpy()]


def kept(
    model: Any, every: Sequence[Head], some: Sequence[Head], distance: int = 5, reference: Tensor | None = None
) -> Any:
    """One distance in all heads but some; these keep theirs or, with a reference, have their mean output."""
    hooks = tp.dummy_distance(model, distance, heads=[head for head in every if head not in some])
    return hooks if reference is None else hooks + tp.ablate_heads(model, some, mode="mean", reference=reference)


def greedy(model: Any, texts: Tensor, candidates: Sequence[Head], n: int) -> list[Head]:
    """Add the candidate whose distances lower the loss most, n times.

    A gain is measured again only while it may be the largest, as gains mostly shrink with every head that is added.
    """
    every = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    taken: list[Head] = []
    gains = dict.fromkeys(candidates, torch.inf)
    loss = losses(model, texts, tp.dummy_distance(model, 5)).mean().item()
    while len(taken) < min(n, len(candidates)):
        measured: dict[Head, float] = {}
        while (best := max(gains, key=lambda head: gains[head])) not in measured:
            measured[best] = losses(model, texts, kept(model, every, [*taken, best])).mean().item()
            gains[best] = loss - measured[best]
        taken.append(best)
        loss = measured[best]
        del gains[best]
    return taken


def shown(heads: Sequence[Head]) -> str:
    return " ".join(f"L{layer}H{head}" for layer, head in heads)
