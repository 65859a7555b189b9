"""Measure the queries and keys of every rotary layer and collect one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pandas as pd
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.models.capture import Captured, for_each_layer
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Texts
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.utils.tables import join_texts
from tl_posdisent.utils.validation import check_integer

Measured = TypeVar("Measured")


class RotaryLayer(NamedTuple):
    """The vectors of one layer before rotation, in texts of equal length, and how it makes scores of them."""

    rotary: Rotary
    scale: float
    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv d_head"]


def measure_layers(
    reading: ModelReading,
    texts: Texts,
    tool: str,
    measure: Callable[[RotaryLayer], Measured],
    table: Callable[[AttentionSpec, list[Measured]], pd.DataFrame],
    *,
    layers: Any = None,
    sinks: int = 0,
    progress: bool = True,
    leave: int = 1,
) -> pd.DataFrame:
    """Measure each layer in the texts of each length and join the layers' tables, with ``layer`` before ``head``.

    One forward pass per length of text, without score matrices, one layer in memory. ``tool`` needs the rotation (for
    errors); ``measure`` is called with one layer in texts of equal length, and ``table`` with what it found for each
    group of ``texts``. At least ``leave`` positions behind the ``sinks`` must remain.
    """
    specs = reading.rotary(layers, tool)
    check_integer("sinks", sinks, 0, min(texts.lengths) - leave)
    scales = {spec.layer: spec.require_scale() for spec in specs}
    found: dict[int, list[Measured]] = {}
    tables = []
    with tqdm(total=len(specs) * len(texts.groups), desc="layers", disable=not progress) as bar:

        def note(layer: Captured) -> None:
            q, k = layer.q[:, sinks:], layer.k[:, sinks:]
            parts = found.setdefault(layer.layer, [])
            parts.append(measure(RotaryLayer(layer.spec.require_rotary(tool), scales[layer.layer], q, k)))
            if len(parts) == len(texts.groups):
                of_layer = table(layer.spec, found.pop(layer.layer))
                of_layer.insert(list(of_layer.columns).index("head"), "layer", layer.layer)
                tables.append(of_layer)
            bar.update()

        for group in texts.groups:
            for_each_layer(reading.model, group.tokens, specs, note, scores=False)
    return reading.note(pd.concat(tables, ignore_index=True))


def rows_by_text(texts: Texts) -> Callable[[AttentionSpec, list[pd.DataFrame]], pd.DataFrame]:
    """The ``table`` of measures that have rows for each text."""
    return lambda spec, parts: join_texts(parts, [group.rows.tolist() for group in texts.groups], ["batch", "head"])
