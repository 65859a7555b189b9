"""How additive are the scores of each text, and beside which baselines?"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.texts import Source, parts
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.hooks import applied

TEXTS, LENGTH = 8, 256


def rows(model: Any, source: Source) -> Iterator[Row]:
    """r of each text's own scores, of random projections, and of one copy with random weights of each kind."""
    texts = parts(model, source, TEXTS, LENGTH)
    random, shuffled = (next(tp.random_control(model, [0], weights=kind)) for kind in ("random", "shuffled"))  # type: ignore[arg-type]
    tables = {
        "trained": tp.additivity(model, texts, progress=False),
        "random queries and keys": with_random_projections(model, texts, random.cfg.initializer_range),
        "random": tp.additivity(random, texts, progress=False),
        "shuffled": tp.additivity(shuffled, texts, progress=False),
    }
    for column in ("r_held_out", "r", "r_no_distance"):
        for name, table in tables.items():
            by_text = torch.tensor(table.groupby("batch")[column].mean().to_numpy())
            yield row(f"{column}, {name}", by_text, LENGTH, f'additivity(model, texts)["{column}"]')
    layers = {name: table.groupby("layer")["r_held_out"].mean() for name, table in tables.items()}
    above = sum((layers["trained"] > layers[name]).to_numpy() for name in ("random", "shuffled")) == 2
    over = f"{len(above)} layers"
    yield Row("share of layers above both copies", above.mean(), torch.nan, over, LENGTH, "r_held_out")


@torch.no_grad()
def with_random_projections(model: Any, texts: Tensor, std: float) -> pd.DataFrame:
    """``additivity`` of queries and keys that are random projections of the model's own residual stream.

    They are those of a copy whose heads have the outputs of the model's.
    """
    copy, generator = deepcopy(model), torch.Generator().manual_seed(0)
    for block in copy.blocks:
        for name, x in [*block.attn.q.named_parameters(), *block.attn.k.named_parameters()]:
            x.copy_(torch.zeros_like(x) if name.endswith("bias") else torch.randn(x.shape, generator=generator) * std)
    outputs = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    _, cache = model.run_with_cache(texts, names_filter=outputs)
    with applied(copy, [(name, partial(instead, cache[name])) for name in outputs]):
        return tp.additivity(copy, texts, progress=False)


def instead(z: Tensor, x: Tensor, hook: Any) -> Tensor:
    """Give a head's output another value."""
    return z
