"""Distance patterns of every rotary subspace of a model's heads: sizes, concentrations and shares of the scores."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.experiments.attention_scores.measure_layers import measure_layers
from tl_posdisent.hooks.hook_list import Heads, any_heads
from tl_posdisent.models.capture import Captured
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.rope.subspaces import subspace_patterns_qk
from tl_posdisent.utils.tensor_checks import Numbers
from tl_posdisent.utils.validation import listed

# Of texts of equal length: queries and keys of each text and position.
_TextVectors = tuple[AttentionSpec, Tensor, Tensor]


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
