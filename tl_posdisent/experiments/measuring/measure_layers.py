"""Run a measurement of queries and keys in each layer, for texts of any lengths, and join the layers' tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pandas as pd
from torch import Tensor

from tl_posdisent.hooks.hook_list import any_heads
from tl_posdisent.models.capture import Captured, for_each_layer, some_heads
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.tables import number_heads
from tl_posdisent.utils.validation import check_integer

Measured = TypeVar("Measured")


def measure_layers(
    reading: ModelReading,
    texts: Texts,
    tool: str,
    measure: Callable[[Captured, Tensor, Tensor], Measured],
    table: Callable[[AttentionSpec, list[Measured]], pd.DataFrame],
    *,
    layers: Any = None,
    heads: Any = None,
    sinks: int = 0,
    progress: bool = True,
    leave: int = 1,
) -> pd.DataFrame:
    """Measure each layer in the texts of each length and join the layers' tables, with ``layer`` before ``head``.

    One forward pass per length of text, without score matrices, one layer in memory. ``tool`` needs the rotation (for
    errors); ``measure`` is called with the chosen heads of one layer in texts of equal length, their queries and keys
    without the ``sinks``, and ``table`` with what it found for each group of ``texts``; its heads are numbered from 0.
    At least ``leave`` positions must remain.
    """
    chosen = any_heads(reading, layers, heads, tool)
    specs, by_layer = [spec for spec, _ in chosen], {spec.layer: some for spec, some in chosen}
    check_integer("sinks", sinks, 0, min(texts.lengths) - leave)
    found: dict[int, list[Measured]] = {}
    tables = []
    with progress_bar(total=len(specs) * len(texts.groups), desc="layers", disable=not progress) as bar:

        def note(layer: Captured) -> None:
            parts, some = found.setdefault(layer.layer, []), by_layer[layer.layer]
            layer = some_heads(layer, some)
            parts.append(measure(layer, layer.q[:, sinks:], layer.k[:, sinks:]))
            if len(parts) == len(texts.groups):
                of_layer = number_heads(table(layer.spec, found.pop(layer.layer)), some)
                of_layer.insert(list(of_layer.columns).index("head"), "layer", layer.layer)
                tables.append(of_layer)
            bar.update()

        for group in texts.groups:
            for_each_layer(reading.model, group.tokens, specs, note, scores=False)
    return reading.note(pd.concat(tables, ignore_index=True))
