"""A model's heads at controlled distances (arXiv 2503.13305, §3): each query with each key at each distance.

Tables of every head: the shares of ``rope.decompose``, and r at controlled distances beside r of the text.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import pandas as pd
from torch import Tensor

from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.measure_layers import measure_layers
from tl_posdisent.hooks.hook_list import Chosen, Heads, any_heads, pairs_of
from tl_posdisent.models.capture import Captured
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.rope.factorial_variance_decomposition import decompose
from tl_posdisent.rope.moments import Moments
from tl_posdisent.utils.tensor_checks import Numbers
from tl_posdisent.utils.validation import listed


def controlled_distance(
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
    """Decompose every head's scores over all combinations of distances, queries and keys of a text.

    In a text each pair of tokens has one distance. Here each query is combined with each key at each distance (see
    ``decompose``). This takes one forward pass, for queries and keys, and computes no scores.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``; with rotary embeddings.
        tokens, attention_mask: as in ``additivity``; queries and keys of all texts are pooled, so that queries of one
            text are also combined with keys of the others.
        distances: any finite numbers; default all distances of the longest text, from 0, also beyond a layer's sliding
            window.
        layers: default all.
        heads: query heads, as in ``head_ablation``; default all.
        sinks: number of first positions of each text to leave out, as queries and as keys.
        progress: show a progress bar.

    Returns:
        One row per layer and head: ``layer``, ``head``, ``mean``, ``total`` (variance), ``r_three_axis``,
        ``r_two_axis``, and the shares ``distance:query``, ``distance:key``, ``query:key``, ``distance:query:key``,
        ``distance``, ``query``, ``key``. With a soft cap (Gemma 2) they describe the scores before it.

    Raises:
        ValueError: invalid arguments; a layer without rotary embeddings.

    Example:
        >>> from tl_posdisent import controlled_distance, demo_tokens, load_demo_model
        >>> table = controlled_distance(load_demo_model(), demo_tokens(length=128), progress=False)
        >>> bool((table["r_two_axis"] >= table["r_three_axis"]).all())  # the two-axis model contains the other
        True
    """
    layers = listed("layers", layers)
    reading = read_model(model)
    texts, tool = read_texts(reading.model, tokens, attention_mask), "controlled_distance"
    chosen = any_heads(reading, layers, heads, tool)
    distances = range(texts.longest) if distances is None else distances

    def measure(layer: Captured, q: Tensor, k: Tensor) -> Moments:
        return Moments.from_qk(q, k, layer.spec.require_rotary(tool))

    def table(spec: AttentionSpec, moments: list[Moments]) -> pd.DataFrame:
        return decompose(functools.reduce(operator.add, moments), distances, scale=spec.require_scale()).to_frame()

    return measure_layers(reading, texts, chosen, measure, table, sinks=sinks, progress=progress)


_CONTROLLED = ["r_three_axis", "r_two_axis"]


def disentanglement(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    sinks: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure r of every head's scores: three-axis on the text, and three-axis and two-axis at controlled distances.

    The columns are the same for every position encoding, so tables of several models or checkpoints can be
    concatenated.

    Args:
        model, tokens, attention_mask, layers, heads, progress: as in ``additivity``.
        sinks: number of first positions to leave out of ``controlled_distance``.

    Returns:
        One row per layer and head: ``layer``, ``head``; ``r`` of ``additivity`` with ``pool``; ``r_three_axis`` and
        ``r_two_axis`` of ``controlled_distance`` over all distances that the layer's mask allows. NaN where scores do
        not vary, or where a layer's distances cannot be controlled.

    Raises:
        ValueError: as ``additivity``.

    Example:
        >>> from tl_posdisent import demo_tokens, disentanglement, load_demo_model
        >>> table = disentanglement(load_demo_model(), demo_tokens(length=128), progress=False)
        >>> table.columns.tolist(), len(table)
        (['layer', 'head', 'r', 'r_three_axis', 'r_two_axis'], 40)
    """
    layers = listed("layers", layers)
    reading = read_model(model)
    chosen, texts = any_heads(reading, layers, heads), read_texts(reading.model, tokens, attention_mask)
    table = additivity(reading, texts, heads=pairs_of(chosen), pool=True, progress=progress)[["layer", "head", "r"]]
    by_distances: dict[tuple[int, ...], Chosen] = {}  # that their masks allow
    for spec, numbers in chosen:
        if spec.rotary is not None and not spec.limits.problem:
            first = 0 if spec.causal else 1 - texts.longest
            allowed = tuple(d for d in range(first, texts.longest) if spec.window is None or abs(d) < spec.window)
            by_distances.setdefault(allowed, []).append((spec, numbers))
    tables = [
        controlled_distance(reading, texts, distances=distances, heads=pairs_of(alike), sinks=sinks, progress=progress)
        for distances, alike in by_distances.items()
    ]
    if not tables:
        return reading.note(table.assign(**dict.fromkeys(_CONTROLLED, float("nan"))))
    controlled = pd.concat(tables)[["layer", "head", *_CONTROLLED]]
    return reading.note(table.merge(controlled, on=["layer", "head"], how="left", validate="one_to_one"))
