"""Measures of queries and keys for each head of a model: positional and symbolic, preference flips, subspaces.

Each function applies the function of the same name with ``_qk`` (in ``rope``) to every head of a model on a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.experiments.attention_scores.measure_layers import measure_layers
from tl_posdisent.hooks.hook_list import Chosen, Heads, any_heads
from tl_posdisent.models.agreement import spread_rows
from tl_posdisent.models.capture import Captured
from tl_posdisent.models.reading.model_reading import Layers, ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts
from tl_posdisent.rope.positional_symbolic import positional_symbolic_qk
from tl_posdisent.rope.preference_flips import check_distance_sets, preference_flips_qk
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.rope.subspaces import subspace_patterns_qk
from tl_posdisent.utils.tables import join_texts
from tl_posdisent.utils.validation import Numbers, check_flag, check_integer, listed, real_numbers

NEAR = range(8)
_N_FAR = 8
# Of texts of equal length: queries and keys of each text and position.
_TextVectors = tuple[AttentionSpec, Tensor, Tensor]


def positional_symbolic(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    by_subspace: bool = False,
    sinks: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure whether each head's scores stay at a position (*positional*) or move with the keys (*symbolic*).

    The result is exact, whereas the paper samples permutations (``positional_symbolic_qk``). It takes one forward pass
    and forms no score matrix.

    Args:
        model, tokens, attention_mask, layers, heads, progress: as in ``controlled_distance``.
        by_subspace: add a row for each rotary subspace, computed from the scores of that subspace alone.
        sinks: positions to leave out at the beginning of each text, as queries and as keys.

    Returns:
        One row per text, layer and head (and subspace): ``batch``, ``layer``, ``head``, (``subspace``, ``frequency``,)
        ``positional`` and ``symbolic``, each 0 … 1, their sum at most 1.

    Raises:
        ValueError: invalid arguments; a layer without rotary embeddings.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, positional_symbolic
        >>> table = positional_symbolic(load_demo_model(), demo_tokens(length=64), layers=[0, 4], progress=False)
        >>> len(table), bool((table["positional"] + table["symbolic"] <= 1).all())
        (16, True)
    """
    check_flag("by_subspace", by_subspace)
    layers = listed("layers", layers)
    reading = read_model(model)
    texts = read_texts(reading.model, tokens, attention_mask)

    def measure(q: Tensor, k: Tensor, rotary: Rotary) -> pd.DataFrame:
        return positional_symbolic_qk(q, k, rotary, by_subspace=by_subspace)

    chosen = any_heads(reading, layers, heads, "positional_symbolic")
    return _measure_texts(reading, texts, chosen, "positional_symbolic", measure, sinks, progress=progress)


def preference_flips(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    near: Sequence[float] | Tensor = NEAR,
    far: Sequence[float] | Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    sinks: int = 0,
    queries: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure how often the distance decides which of two keys a head prefers; in an additive head it never does.

    A query compares two keys at distance d, and again at d′; the preference *flips* if one key has the higher score at
    d and the other at d′. The probability of a flip, over all queries, pairs of keys of the text and pairs of distances
    (``preference_flips_qk``), is 0 for additive and two-axis scores, ½ if the orders are unrelated, 1 if they are
    reversed. Compare it with ``random_control``: random weights flip too.

    Args:
        model, tokens, attention_mask, layers, heads, progress: as in ``controlled_distance``.
        near: near distances in positions, default 0 … 7.
        far: far distances; default eight, in geometric steps from 8 to the length of the longest text (at least 15).
        sinks: positions to leave out at the beginning of each text, as queries and as keys.
        queries: number of queries of each text to use, evenly spaced; default all. Time grows with queries · keys² ·
            distances.

    Returns:
        One row per text, layer and head: ``batch``, ``layer``, ``head``; ``near``, ``far`` and ``near_far``, the
        probability of a flip between two near distances, two far ones, and one of each.

    Raises:
        ValueError: invalid arguments; a distance that is both near and far; a layer without rotary embeddings.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, preference_flips
        >>> table = preference_flips(load_demo_model(), demo_tokens(length=64), layers=[4], queries=16, progress=False)
        >>> list(table.columns)
        ['batch', 'layer', 'head', 'near', 'far', 'near_far']
        >>> bool((table["near_far"] > 0.1).all())  # although these scores are nearly additive, with r = 0.88
        True
    """
    if queries is not None:
        check_integer("queries", queries, 1)
    layers = listed("layers", layers)
    reading = read_model(model)
    texts = read_texts(reading.model, tokens, attention_mask)
    near_at = real_numbers("near", near, torch.device("cpu"))
    if far is None:
        steps = np.geomspace(len(NEAR), max(texts.longest - 1, 2 * len(NEAR) - 1), _N_FAR).round()
        far = [int(d) for d in np.unique(steps) if d not in near_at.tolist()]
    sets = check_distance_sets(near_at, far)

    def measure(q: Tensor, k: Tensor, rotary: Rotary) -> pd.DataFrame:
        chosen_q = q if queries is None else q[:, spread_rows(q.shape[1], queries)]
        return preference_flips_qk(chosen_q, k, rotary, *sets)

    chosen = any_heads(reading, layers, heads, "preference_flips")
    return _measure_texts(reading, texts, chosen, "preference_flips", measure, sinks, progress=progress)


def _measure_texts(
    reading: ModelReading,
    texts: Texts,
    chosen: Chosen,
    tool: str,
    measure: Callable[[Tensor, Tensor, Rotary], pd.DataFrame],
    sinks: int,
    *,
    progress: bool,
) -> pd.DataFrame:
    """Call ``measure`` with queries, keys and rotation of each layer; its table has rows for each text."""
    rows = [group.rows.tolist() for group in texts.groups]

    def measure_layer(layer: Captured, q: Tensor, k: Tensor) -> pd.DataFrame:
        return measure(q, k, layer.spec.require_rotary(tool))

    def table(spec: AttentionSpec, parts: list[pd.DataFrame]) -> pd.DataFrame:
        return join_texts(parts, rows, ["batch", "head"])

    # Both measures compare keys, so at least two must remain.
    return measure_layers(reading, texts, chosen, measure_layer, table, sinks=sinks, leave=2, progress=progress)


def subspace_patterns(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    distances: Numbers | None = None,
    layers: Layers = None,
    heads: Heads = None,
    sinks: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure size, concentration and shares of every subspace of every head (arXiv 2503.13305).

    Scores are additive if each subspace is slow or its keys are concentrated (``subspace_patterns_qk``). This takes one
    forward pass and forms no score matrix.

    Args:
        model, tokens, attention_mask, distances, layers, heads, sinks, progress: as in ``controlled_distance``.

    Returns:
        One row per layer, head and subspace: ``layer``, ``head`` and the columns of ``subspace_patterns_qk``, such as
        ``frequency``, ``key_concentration`` and the shares ``distance``, ``semantic`` and ``interaction``, which add up
        to 1 in each head.

    Raises:
        ValueError: invalid arguments; a layer without rotary embeddings.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, subspace_patterns
        >>> table = subspace_patterns(load_demo_model(), demo_tokens(length=128), layers=[4], progress=False)
        >>> len(table)  # 8 heads of 8 subspaces
        64
        >>> mean = table.groupby("subspace")[["key_concentration", "semantic"]].mean()
        >>> bool(mean["semantic"].idxmax() > 3)  # content sits in slow subspaces
        True
    """
    layers = listed("layers", layers)
    reading = read_model(model)
    texts = read_texts(reading.model, tokens, attention_mask)
    tool = "subspace_patterns"
    chosen = any_heads(reading, layers, heads, tool)
    distances = range(texts.longest) if distances is None else distances

    def keep(layer: Captured, q: Tensor, k: Tensor) -> _TextVectors:
        return layer.spec, q.flatten(0, 1), k.flatten(0, 1)

    def table(spec: AttentionSpec, parts: list[_TextVectors]) -> pd.DataFrame:
        specs, queries, keys = zip(*parts, strict=True)
        rotary, scale = specs[0].require_rotary(tool), specs[0].require_scale()  # as the model rotates these texts
        return subspace_patterns_qk(torch.cat(queries), torch.cat(keys), rotary, distances, scale=scale)

    return measure_layers(reading, texts, chosen, keep, table, sinks=sinks, progress=progress)
