"""The positional–symbolic plane (arXiv 2511.11579) of every head of a model on a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from torch import Tensor

from tl_posdisent.models.capture import Captured
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.rope.positional_symbolic import positional_symbolic_qk
from tl_posdisent.utils.validation import check_flag

from .measure_layers import measure_layers, rows_by_text


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
