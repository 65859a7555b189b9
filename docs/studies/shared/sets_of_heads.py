"""Sets of heads: ranked by curvature or by the change of their outputs, and found by a greedy search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import tl_posdisent as tp
from shared.rows import losses
from tl_posdisent.hooks import applied
from tl_posdisent.hooks.hook_list import Hooks

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


def output_change(model: Any, texts: torch.Tensor, hooks: Hooks) -> pd.DataFrame:
    """The squared change of each head's output through W_O, of the layer's own input, over the squared residual stream
    to which it is added: the mean over tokens. No gradient is needed, and two passes for all heads."""
    layers = range(model.cfg.n_layers)
    streams, outputs = ([f"blocks.{n}.{name}" for n in layers] for name in ("hook_resid_pre", "attn.hook_z"))
    _, own = model.run_with_cache(texts, names_filter=[*streams, *outputs])
    unmodified = [(name, lambda x, hook: own[hook.name]) for name in streams]  # each layer has its own input
    with applied(model, hooks + unmodified):
        _, changed = model.run_with_cache(texts, names_filter=outputs)
    found = []
    for n, stream, z in zip(layers, streams, outputs, strict=True):
        added = torch.einsum("bphd,hdm->bphm", changed[z] - own[z], model.blocks[n].attn.W_O)
        share = added.square().sum(-1) / own[stream].square().sum(-1, keepdim=True)
        found += [(n, head, x) for head, x in enumerate(share.mean((0, 1)).tolist())]
    return pd.DataFrame(found, columns=["layer", "head", "output change"])


def of_heads(hooks: Hooks, heads: Sequence[tuple[int, int]]) -> Hooks:
    """The hooks of some heads alone."""
    every = [(x, tuple(h for h in x.heads if (x.spec.layer, h) in heads)) for x in hooks.interventions]
    return Hooks(replace(x, heads=some) for x, some in every if some)
