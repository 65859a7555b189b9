"""Distance patterns in every subspace of a model: what is slow, what is concentrated, what is used for what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.rope.subspaces import subspace_patterns_qk
from tl_posdisent.rope.variance_decomposition import Numbers

from .rotary_layers import RotaryLayer, measure_layers


def subspace_patterns(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    *,
    distances: Numbers | None = None,
    layers: Iterable[int] | None = None,
    burn_in: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Size, concentration and shares of every subspace of every head (arXiv 2503.13305, Observation 1 and Theorem 2).

    Additivity needs each subspace to be slow, or its keys to be concentrated: see ``subspace_patterns_qk``, which this
    asks layer by layer in one forward pass, without score matrices.

    Args:
        model: HookedTransformer, TransformerBridge or alike, with rotary embeddings.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer. Queries and keys of all texts are pooled.
        distances: at which all pairs are scored, default ``0 … pos - 1``; any finite numbers.
        layers: default all.
        burn_in: positions to leave out at the beginning of each text (attention sinks are unlike all other keys).
        progress: show a bar.

    Returns:
        One row per layer, head and subspace: ``layer``, ``head``, ``subspace``, ``frequency`` (radians per position),
        ``wavelength`` (positions), ``turn``; ``query_size``, ``query_variation``, ``query_phase``,
        ``query_concentration``, the same of ``key``; ``relative_phase``, ``relative_concentration``; the shares
        ``distance``, ``semantic``, ``interaction``, which add up to 1 in each head; and ``spread``. See
        ``SubspacePatterns`` for each.

    Raises:
        ValueError: unusable tokens, layers or distances; ``burn_in`` that leaves nothing; a layer without rotary
            embeddings.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, subspace_patterns
        >>> table = subspace_patterns(load_demo_model(), demo_tokens(length=128), layers=[4], progress=False)
        >>> len(table)  # 8 heads of 8 subspaces
        64
        >>> mean = table.groupby("subspace")[["key_concentration", "semantic"]].mean()
        >>> bool(mean["semantic"].idxmax() > 3)  # content sits in slow subspaces
        True
    """

    def measure(layer: RotaryLayer) -> pd.DataFrame:
        at = range(layer.length) if distances is None else distances
        return subspace_patterns_qk(layer.q, layer.k, layer.rotary, at, scale=layer.scale).to_frame()

    return measure_layers(
        model, tokens, "subspace_patterns", measure, layers=layers, burn_in=burn_in, progress=progress
    )
