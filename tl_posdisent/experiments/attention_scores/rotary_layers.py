"""A measurement of every rotary layer's queries and keys, as one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, NamedTuple

import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.models.capture import stream
from tl_posdisent.models.forward import check_tokens
from tl_posdisent.models.reading import read_rotary_layers
from tl_posdisent.models.spec import AttentionSpec
from tl_posdisent.rope.rotary import Rotary


class RotaryLayer(NamedTuple):
    """One layer's vectors before rotation, and how it makes scores of them."""

    rotary: Rotary
    scale: float
    length: int  # of the texts, with what was left out of q and k
    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv d_head"]


def rotary_specs(model: Any, layers: Iterable[int] | None, tool: str) -> list[AttentionSpec]:
    """Layers that ``tool`` can work on, or an error that says which cannot."""
    specs = read_rotary_layers(model, layers, tool)
    for spec in specs:
        spec.require_scale()
    return specs


def check_burn_in(burn_in: int, length: int, *, leave: int = 1) -> None:
    """Refuse a burn-in that leaves fewer than ``leave`` positions."""
    if isinstance(burn_in, bool) or not isinstance(burn_in, int) or not 0 <= burn_in <= length - leave:
        raise ValueError(f"burn_in must be an integer from 0 to {length - leave}, got {burn_in!r}")


def measure_layers(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    tool: str,
    measure: Callable[[RotaryLayer], pd.DataFrame],
    *,
    layers: Iterable[int] | None,
    burn_in: int,
    progress: bool,
    leave: int = 1,
) -> pd.DataFrame:
    """What ``measure`` says of each rotary layer, in one table with a column ``layer`` before ``head``.

    One forward pass without score matrices, one layer in memory. The first ``burn_in`` positions of each text are left
    out, of which at least ``leave`` others must remain.
    """
    specs = rotary_specs(model, layers, tool)
    tokens = check_tokens(model, tokens)
    check_burn_in(burn_in, tokens.shape[1], leave=leave)
    tables = []
    with closing(stream(model, tokens, specs, scores=False)) as run:  # or an error would leave the pass waiting
        for layer in tqdm(run, total=len(specs), desc="layers", disable=not progress):
            assert layer.q is not None
            assert layer.k is not None
            assert layer.spec.rotary is not None
            scale, length = layer.spec.require_scale(), tokens.shape[1]
            q, k = layer.q[:, burn_in:], layer.k[:, burn_in:]
            table = measure(RotaryLayer(layer.spec.rotary, scale, length, q, k))
            table.insert(list(table.columns).index("head"), "layer", layer.layer)
            tables.append(table)
    return pd.concat(tables, ignore_index=True)
