"""How many heads need no query? Static attention, fitted to speeches, in the first heads of four orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, losses, row
from shared.texts import Source, parts

import tl_posdisent as tp
from tl_posdisent.hooks import applied, fitted_attention
from tl_posdisent.hooks.hook_list import Hooks

LENGTH, TEXTS, HEADS, ORDERS = 256, 4, (60, 120), 5
COLUMNS = ["layer", "head"]
CALL = "fitted_attention(model, speeches)"


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The loss that is added where the first 60 and 120 heads of an order have static attention. It is fitted to
    speeches, the orders are of other speeches, the loss is of others again or of articles of WikiText.

    Orders: by the change of a head's output, by the curvature of ``head_effects``, the last layers first (are the
    others more than an order of layers?), and at random.
    """
    if source == "demo" or model.cfg.n_layers * model.cfg.n_heads < 2 * max(HEADS):
        return
    static, orders = prepared(model)
    measured = parts(model, source, TEXTS, LENGTH)
    base = losses(model, measured)
    for n in HEADS:
        added = {name: losses(model, measured, of_heads(static, order[:n])) - base for name, order in orders.items()}
        drawn = torch.stack([added.pop(f"random {seed}") for seed in range(ORDERS)]).mean(1)
        for name, loss in added.items():
            yield row(f"added loss, {n} heads, {name}", loss, LENGTH, CALL)
        over = f"{ORDERS} orders (standard deviation), {len(measured)} texts"
        yield Row(f"added loss, {n} heads, random", drawn.mean().item(), drawn.std().item(), over, LENGTH, CALL)
        less = added["curvature"] - added["output change"]
        yield row(f"added loss, {n} heads, curvature less output change", less, LENGTH, CALL)


def prepared(model: Any) -> tuple[Hooks, dict[str, Sequence[tuple[int, int]]]]:
    """Static attention of all heads, and the heads in each order, from texts of eight speeches."""
    speeches = parts(model, "speeches", 2 * TEXTS, LENGTH, skip=TEXTS)
    fitted, ordered = speeches.split(TEXTS)
    static = fitted_attention(model, fitted)
    change = output_change(model, ordered, static)
    effects = tp.head_effects(model, ordered, static, exact=0, draws=8, progress=False)
    table = effects[[*COLUMNS, "curvature"]].merge(change)
    orders = {
        "output change": table.sort_values("output change"),
        "curvature": table.sort_values("curvature"),
        "last layers first": table.sort_values(["layer", "head"], ascending=False),
        **{f"random {seed}": table.sample(frac=1, random_state=seed) for seed in range(ORDERS)},
    }
    return static, {name: list(map(tuple, some[COLUMNS].to_numpy())) for name, some in orders.items()}


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
    return pd.DataFrame(found, columns=[*COLUMNS, "output change"])


def of_heads(hooks: Hooks, heads: Sequence[tuple[int, int]]) -> Hooks:
    """The hooks of some heads alone."""
    every = [(x, tuple(h for h in x.heads if (x.spec.layer, h) in heads)) for x in hooks.interventions]
    return Hooks(replace(x, heads=some) for x, some in every if some)
