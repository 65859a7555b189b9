"""Run a measurement of queries and keys in each layer, for texts of any lengths, and join the layers' tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pandas as pd
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.hooks.hook_list import Chosen
from tl_posdisent.models.capture import Captured, for_each_layer, some_heads
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.tables import number_heads
from tl_posdisent.utils.validation import check_integer

Measured = TypeVar("Measured")


def measure_layers(
    reading: ModelReading,
    texts: Texts,
    chosen: Chosen,
    measure: Callable[[Captured, Tensor, Tensor], Measured],
    table: Callable[[AttentionSpec, list[Measured]], pd.DataFrame],
    *,
    sinks: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure each layer in the texts of each length and join the layers' tables, with ``layer`` before ``head``.

    One forward pass per length of text, without score matrices, one layer in memory. ``measure`` is called with the
    chosen heads of one layer in texts of equal length, their queries and keys without the ``sinks``, and ``table`` with
    what it returned for each group of ``texts``; its heads are numbered from 0.
    """
    specs, heads = [spec for spec, _ in chosen], {spec.layer: numbers for spec, numbers in chosen}
    check_integer("sinks", sinks, 0, min(texts.lengths) - 1)
    measured: dict[int, list[Measured]] = {}
    tables = []
    with tqdm(total=len(specs) * len(texts.groups), desc="layers", disable=not progress) as bar:

        def add(layer: Captured) -> None:
            parts, numbers = measured.setdefault(layer.layer, []), heads[layer.layer]
            layer = some_heads(layer, numbers)
            parts.append(measure(layer, layer.q[:, sinks:], layer.k[:, sinks:]))
            if len(parts) == len(texts.groups):
                rows = number_heads(table(layer.spec, measured.pop(layer.layer)), numbers)
                rows.insert(list(rows.columns).index("head"), "layer", layer.layer)
                tables.append(rows)
            bar.update()

        for group in texts.groups:
            for_each_layer(reading.model, group.tokens, specs, add, scores=False)
    return reading.note(pd.concat(tables, ignore_index=True))
