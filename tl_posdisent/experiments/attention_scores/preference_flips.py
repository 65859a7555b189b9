"""Preference flips of every head of a model on a text: the plainest number for additivity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.models.capture import Captured, spread_rows
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.rope.factorial_variance_decomposition import numbers
from tl_posdisent.rope.preference_flips import check_distance_sets, preference_flips_qk
from tl_posdisent.utils.validation import check_integer

from .measure_layers import measure_layers, rows_by_text

NEAR = range(8)
_N_FAR = 8


def preference_flips(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    near: Sequence[float] | Tensor = NEAR,
    far: Sequence[float] | Tensor | None = None,
    layers: int | Iterable[int] | None = None,
    sinks: int = 0,
    queries: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure how often the distance decides which of two keys a head prefers: never, in an additive head.

    A query compares two keys at distance d, and again at d′; the preference *flips* if one key has the higher score at
    d and the other at d′. The probability of a flip, over all queries, pairs of keys of the text and pairs of distances
    (``preference_flips_qk``), is 0 for additive and two-axis scores, ½ if the orders are unrelated, 1 if they are
    reversed. Compare it with ``random_control``: random weights flip too.

    Args:
        model, tokens, attention_mask, layers, progress: as in ``controlled_distance``.
        near: near distances in positions, default 0 … 7.
        far: far ones; default eight, in geometric steps from 8 to the longest of the texts (at least 15).
        sinks: positions to leave out at the beginning of each text, as queries and as keys.
        queries: compare only for this many queries of each text, evenly spaced; default all. Time grows with queries ·
            keys² · distances.

    Returns:
        One row per text, layer and head: ``batch``, ``layer``, ``head``; ``near``, ``far`` and ``near_far``, the
        probability of a flip between two near distances, two far ones, and one of each.

    Raises:
        ValueError: unusable arguments; a distance that is near and far; a layer without rotary embeddings.

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
    reading = read_model(model, layers)
    texts = read_texts(reading.model, tokens, attention_mask)
    near_at = numbers("near", near, torch.device("cpu"))
    if far is None:
        steps = np.geomspace(len(NEAR), max(texts.longest - 1, 2 * len(NEAR) - 1), _N_FAR).round()
        far = [int(d) for d in np.unique(steps) if d not in near_at.tolist()]
    sets = check_distance_sets(near_at, far)

    def measure(layer: Captured) -> pd.DataFrame:
        q = layer.q if queries is None else layer.q[:, spread_rows(layer.q.shape[1], queries)]
        return preference_flips_qk(q, layer.k, layer.spec.require_rotary("preference_flips"), *sets)

    options: dict[str, Any] = {"layers": layers, "sinks": sinks, "progress": progress, "leave": 2}
    return measure_layers(reading, texts, "preference_flips", measure, rows_by_text(texts), **options)
