"""How few heads need their distances?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from shared.rows import Row, losses, row
from shared.sets_of_heads import Head, by_curvature, greedy, kept, shown
from shared.texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp

CHOOSING, MEASURED, LENGTH = 2, 4, 256
HEADS, SETS, CANDIDATES = 16, 5, 40


def rows(model: Any, source: Source) -> Iterator[Row]:
    """With one distance in all heads, what the own distances of a few give back: those of the largest curvature and
    those of a greedy search among the 40 of largest curvature (in the first halves of the texts), both chosen on two
    texts at distance 5 and measured on others, and random ones. Controls: what the same heads' mean outputs give back,
    and another distance in the others."""
    texts = parts(model, source, CHOOSING + how_many(model, source, MEASURED), LENGTH)
    chosen_on, measured = texts[:CHOOSING], texts[CHOOSING:]
    ranked = by_curvature(model, chosen_on)
    orders = [torch.randperm(len(ranked), generator=torch.Generator().manual_seed(seed)) for seed in range(SETS)]
    drawn = [[ranked[n] for n in order[:HEADS].tolist()] for order in orders]
    chosen = {f"{HEADS} heads of largest curvature": ranked[:HEADS]}
    if how_many(model, source, MEASURED) == MEASURED:
        searched = greedy(model, chosen_on[:, : LENGTH // 2], ranked[:CANDIDATES], HEADS)
        chosen[f"{HEADS} heads of a greedy search"] = searched
    yield from given_back(model, measured, ranked, chosen, drawn, chosen_on)


def given_back(
    model: Any,
    texts: Tensor,
    every: Sequence[Head],
    chosen: dict[str, Sequence[Head]],
    drawn: Sequence[Sequence[Head]],
    reference: Tensor,
) -> Iterator[Row]:
    """Nats that the distances of some heads give back, and their mean outputs, where the others have one distance."""
    base, collapsed = losses(model, texts), {d: losses(model, texts, tp.dummy_distance(model, d)) for d in (5, 0)}
    for distance, loss in collapsed.items():
        yield row(f"added loss, all heads at {distance}", loss - base, LENGTH, "dummy_distance")
    for distance, what, outputs in ((5, "", None), (5, ", mean outputs instead", reference), (0, "", None)):
        others = f"the others at {distance}"
        for name, heads in chosen.items():
            back = collapsed[distance] - losses(model, texts, kept(model, every, heads, distance, outputs))
            yield row(f"nats given back by {name}{what}, {others}", back, LENGTH, shown(heads))
        by_draw = [losses(model, texts, kept(model, every, heads, distance, outputs)) for heads in drawn]
        name = f"nats given back by {HEADS} random heads{what}, {others}"
        back = (collapsed[distance] - torch.stack(by_draw)).mean(1)
        yield row(name, back, LENGTH, "torch.randperm", f"draws, {len(texts)} texts")
