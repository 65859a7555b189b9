"""Findings about heads: how few need their distances, and how little attention they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rows import Row, losses, row
from texts import Source, how_many, parts, repeated
from torch import Tensor

import tl_posdisent as tp

CHOOSING, MEASURED, LENGTH = 2, 4, 256
HEADS, SETS, CANDIDATES = 16, 5, 40
FITTED, HELD_OUT = 8, 4
WINDOWS = (8, 32)
STUDIES = ("sets", "rungs")

Head = tuple[int, int]


def sets(model: Any, source: Source) -> Iterator[Row]:
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
        found = greedy(model, chosen_on[:, : LENGTH // 2], ranked[:CANDIDATES], HEADS)
        chosen[f"{HEADS} heads of a greedy search"] = found
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
        for name, some in chosen.items():
            back = collapsed[distance] - losses(model, texts, kept(model, every, some, distance, outputs))
            yield row(f"nats given back by {name}{what}, {others}", back, LENGTH, shown(some))
        by_draw = [losses(model, texts, kept(model, every, some, distance, outputs)) for some in drawn]
        name = f"nats given back by {HEADS} random heads{what}, {others}"
        back = (collapsed[distance] - torch.stack(by_draw)).mean(1)
        yield row(name, back, LENGTH, "torch.randperm", f"draws, {len(texts)} texts")


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
    found: list[Head] = []
    gains = dict.fromkeys(candidates, torch.inf)
    loss = losses(model, texts, tp.dummy_distance(model, 5)).mean().item()
    while len(found) < min(n, len(candidates)):
        measured: dict[Head, float] = {}
        while (best := max(gains, key=lambda head: gains[head])) not in measured:
            measured[best] = losses(model, texts, kept(model, every, [*found, best])).mean().item()
            gains[best] = loss - measured[best]
        found.append(best)
        loss = measured[best]
        del gains[best]
    return found


def shown(heads: Sequence[Head]) -> str:
    return " ".join(f"L{layer}H{head}" for layer, head in heads)


def rungs(model: Any, source: Source) -> Iterator[Row]:
    """The share of attention that is kept where all heads are replaced at once, of the loss between mean outputs and
    the model itself: the heads' own attention in a window of the last keys and the first token, also on the second copy
    of a passage; and static attention, predicted for other texts."""
    n = how_many(model, source, HELD_OUT)
    texts = parts(model, source, n + (FITTED // 2 if source == "demo" else FITTED), LENGTH)
    heldout, fitted = texts[:n], texts[n:]
    copied = repeated(heldout)
    for kind, some, first in (("", heldout, 1), (", second copy of a passage", copied, copied.shape[1] // 2 + 2)):
        base, mean = losses(model, some, first=first), losses(model, some, ablated(model, fitted), first)
        yield row(f"loss, mean outputs{kind}", mean, some.shape[1], "ablate_heads(model, None, reference=fitted)")
        for window in WINDOWS:
            hooks = tp.lambda_mask(model, 1, window, LENGTH)
            share = (mean - losses(model, some, hooks, first)) / (mean - base)
            name = f"attention kept, own in a window of {window} and the first token{kind}"
            yield row(name, share, some.shape[1], f"lambda_mask(model, 1, {window}, {LENGTH})")
    options: dict[str, Any] = {"unit": "all", "rungs": ["static"], "controls": [], "progress": False}
    table = tp.attention_ladder(model, fitted, heldout=heldout, **options).set_index("rung")
    value, error, blocks = table.loc["static", ["recovered_mean", "se_mean", "blocks"]]
    call = f'attention_ladder(model, fitted, heldout=texts, unit="all"), {len(fitted)} fitted'
    yield Row("attention kept, static, fitted to other texts", value, error, f"{int(blocks)} blocks", LENGTH, call)


def ablated(model: Any, reference: Tensor) -> Any:
    return tp.ablate_heads(model, None, mode="mean", reference=reference)
