"""Patterns in the rotary subspaces of every head of a model on a text (arXiv 2503.13305)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.models.capture import Captured
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.rope.factorial_variance_decomposition import Numbers
from tl_posdisent.rope.subspaces import subspace_patterns_qk

from .measure_layers import measure_layers


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
