"""Measures of the queries and keys of rotary layers: patterns in subspaces, and the plane of arXiv 2511.11579."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.models.capture import Captured, for_each_layer
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Texts, Tokens, read_texts
from tl_posdisent.rope.positional_symbolic import positional_symbolic_qk
from tl_posdisent.rope.subspaces import subspace_patterns_qk
from tl_posdisent.rope.variance_decomposition import Numbers
from tl_posdisent.utils.tables import join_texts, progress_bar
from tl_posdisent.utils.validation import check_flag, check_integer

Measured = TypeVar("Measured")


def measure_layers(
    reading: ModelReading,
    texts: Texts,
    tool: str,
    measure: Callable[[Captured], Measured],
    table: Callable[[AttentionSpec, list[Measured]], pd.DataFrame],
    *,
    layers: Any = None,
    sinks: int = 0,
    progress: bool = True,
    leave: int = 1,
) -> pd.DataFrame:
    """Measure each layer in the texts of each length and join the layers' tables, with ``layer`` before ``head``.

    One forward pass per length of text, without score matrices, one layer in memory. ``tool`` needs the rotation (for
    errors); ``measure`` is called with one layer in texts of equal length, queries and keys without the ``sinks``, and
    ``table`` with what it found for each group of ``texts``. At least ``leave`` positions must remain.
    """
    specs = reading.rotary(layers, tool)
    check_integer("sinks", sinks, 0, min(texts.lengths) - leave)
    for spec in specs:
        spec.require_scale()
    found: dict[int, list[Measured]] = {}
    tables = []
    with progress_bar(total=len(specs) * len(texts.groups), desc="layers", disable=not progress) as bar:

        def note(layer: Captured) -> None:
            parts = found.setdefault(layer.layer, [])
            parts.append(measure(replace(layer, q=layer.q[:, sinks:], k=layer.k[:, sinks:])))
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


def positional_symbolic(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    layers: int | Iterable[int] | None = None,
    by_subspace: bool = False,
    sinks: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure whether each head's scores stay at a position (*positional*) or move with the keys (*symbolic*).

    Exact, where the paper samples permutations: see ``positional_symbolic_qk``. One forward pass, no score matrix.

    Args:
        model, tokens, attention_mask, layers, progress: as in ``controlled_distance``.
        by_subspace: one row per rotary subspace besides, for the scores of that subspace alone.
        sinks: positions to leave out at the beginning of each text, as queries and as keys.

    Returns:
        One row per text, layer and head (and subspace): ``batch``, ``layer``, ``head``, (``subspace``, ``frequency``,)
        ``positional`` and ``symbolic``, each 0 … 1, their sum at most 1.

    Raises:
        ValueError: unusable arguments; a layer without rotary embeddings.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, positional_symbolic
        >>> table = positional_symbolic(load_demo_model(), demo_tokens(length=64), layers=[0, 4], progress=False)
        >>> len(table), bool((table["positional"] + table["symbolic"] <= 1).all())
        (16, True)
    """
    check_flag("by_subspace", by_subspace)
    reading = read_model(model, layers)
    texts = read_texts(reading.model, tokens, attention_mask)

    def measure(layer: Captured) -> pd.DataFrame:
        rotary = layer.spec.require_rotary("positional_symbolic")
        return positional_symbolic_qk(layer.q, layer.k, rotary, by_subspace=by_subspace)

    options: dict[str, Any] = {"layers": layers, "sinks": sinks, "progress": progress, "leave": 2}
    return measure_layers(reading, texts, "positional_symbolic", measure, rows_by_text(texts), **options)


def subspace_patterns(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    distances: Numbers | None = None,
    layers: int | Iterable[int] | None = None,
    sinks: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure size, concentration and shares of every subspace of every head (arXiv 2503.13305).

    Additivity needs each subspace to be slow, or its keys to be concentrated: see ``subspace_patterns_qk``. One forward
    pass, no score matrix.

    Args:
        model, tokens, attention_mask, distances, layers, sinks, progress: as in ``controlled_distance``.

    Returns:
        One row per layer, head and subspace: ``layer``, ``head`` and the columns of ``subspace_patterns_qk``:
        ``frequency``, ``key_concentration`` …, and the shares ``distance``, ``semantic`` and ``interaction``, which
        add up to 1 in each head.

    Raises:
        ValueError: unusable arguments; a layer without rotary embeddings.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, subspace_patterns
        >>> table = subspace_patterns(load_demo_model(), demo_tokens(length=128), layers=[4], progress=False)
        >>> len(table)  # 8 heads of 8 subspaces
        64
        >>> mean = table.groupby("subspace")[["key_concentration", "semantic"]].mean()
        >>> bool(mean["semantic"].idxmax() > 3)  # content sits in slow subspaces
        True
    """
    reading = read_model(model, layers)
    texts = read_texts(reading.model, tokens, attention_mask)
    at, tool = range(texts.longest) if distances is None else distances, "subspace_patterns"

    def table(spec: AttentionSpec, parts: list[Captured]) -> pd.DataFrame:
        q, k = (torch.cat([x.flatten(0, 1) for x in side]) for side in zip(*((x.q, x.k) for x in parts), strict=True))
        own = parts[0].spec
        return subspace_patterns_qk(q, k, own.require_rotary(tool), at, scale=own.require_scale())

    options: dict[str, Any] = {"layers": layers, "sinks": sinks, "progress": progress}
    return measure_layers(reading, texts, tool, lambda layer: layer, table, **options)
