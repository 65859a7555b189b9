"""How many heads need no query? Static attention, fitted to speeches, in the first heads of four orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from shared.rows import Row, losses, row
from shared.sets_of_heads import of_heads, output_change
from shared.texts import Source, parts

import tl_posdisent as tp
from tl_posdisent.hooks import fitted_attention
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
    return static, {name: list(map(tuple, heads[COLUMNS].to_numpy())) for name, heads in orders.items()}
