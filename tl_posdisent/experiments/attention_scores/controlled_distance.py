"""Controlled distance: every pair at every distance, and what the scores are then made of (arXiv 2503.13305, §3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from jaxtyping import Float64, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.hooks.positions import dummy_distance
from tl_posdisent.models.capture import stream
from tl_posdisent.models.forward import check_tokens
from tl_posdisent.models.spec import AttentionSpec, select
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.variance_decomposition import Numbers, decompose
from tl_posdisent.utils.tables import index_columns

from .rotary_layers import RotaryLayer, measure_layers, rotary_specs


def controlled_distance(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    *,
    distances: Numbers | None = None,
    layers: Iterable[int] | None = None,
    burn_in: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Decompose every head's scores over all combinations of distances, queries and keys of a text.

    In a text each pair has one distance, so position and content can hide behind each other. Here each query meets each
    key at each distance, in closed form: one forward pass for queries and keys, and no score is computed.

    Args:
        model: HookedTransformer, TransformerBridge or alike, with rotary embeddings.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer. Queries and keys of all texts are pooled.
        distances: default ``0 … pos - 1``; any finite numbers.
        layers: default all.
        burn_in: positions to leave out at the beginning of each text (attention sinks are unlike all other keys).
        progress: show a bar.

    Returns:
        One row per layer and head: ``layer``, ``head``, ``mean``, ``total`` (variance), the shares ``distance``,
        ``query``, ``key``, ``distance:query``, ``distance:key``, ``query:key``, ``distance:query:key``, and
        ``r_three_axis``, ``r_two_axis``. With a soft cap (Gemma 2) these are the scores before it.

    Raises:
        ValueError: unusable tokens, layers or distances; ``burn_in`` that leaves nothing; a layer without rotary
            embeddings.

    Example:
        >>> from tl_posdisent import controlled_distance, demo_tokens, load_demo_model
        >>> table = controlled_distance(load_demo_model(), demo_tokens(length=128), progress=False)
        >>> bool((table["r_two_axis"] >= table["r_three_axis"]).all())  # the two-axis model contains the other
        True
    """

    def measure(layer: RotaryLayer) -> pd.DataFrame:
        at = range(layer.length) if distances is None else distances
        return decompose(Moments.from_qk(layer.q, layer.k, layer.rotary), at, scale=layer.scale).to_frame()

    return measure_layers(
        model, tokens, "controlled_distance", measure, layers=layers, burn_in=burn_in, progress=progress
    )


def dummy_distance_check(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    *,
    distances: Iterable[int] = (1, 2, 4, 8, 16, 32, 64),
    layers: Iterable[int] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Are the fitted parts causal? Put all pairs at a dummy distance and see which part moves.

    One layer at a time, hooks let every query see every key at distance d. If the three parts are what they are called,
    the key and the query part of the fit stay where they were, and the mean score follows the fitted distance part.

    Args:
        model, tokens, layers, progress: as in ``controlled_distance``.
        distances: dummy distances that occur in the text (0 … pos - 1), each once.

    Returns:
        One row per text, layer, head and dummy ``distance``: ``key_correlation`` and ``query_correlation``, the
        correlation of that component between the real run and this one, weighted by cells; ``mean``, the mean score in
        this run, and ``component``, what the real fit says it is (intercept and distance component at d). The latter
        contains the linear trend of the keys, which the gauge gives to the distance (see ``AdditiveFit``): the two may
        differ by a straight line in d even where scores are additive.

    Raises:
        ValueError: distances that do not occur, or twice; a layer that shows no scores; what ``controlled_distance``
            refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance_check, load_demo_model
        >>> table = dummy_distance_check(load_demo_model(), demo_tokens(length=128), layers=[4], progress=False)
        >>> bool(table[["mean", "component"]].corr().loc["mean", "component"] > 0.5)
        True
    """
    specs = rotary_specs(model, layers, "dummy_distance_check")
    tokens = check_tokens(model, tokens)
    chosen = select("distances", distances, tokens.shape[1])
    tables = []
    for spec in tqdm(specs, desc="layers", disable=not progress):
        real = _fit(model, tokens, spec)
        for d in chosen:
            with model.hooks(fwd_hooks=dummy_distance(model, d, layers=[spec.layer])):
                dummy = _fit(model, tokens, spec)
            columns = {
                "key_correlation": _correlation(real, dummy, "key"),
                "query_correlation": _correlation(real, dummy, "query"),
                "mean": dummy.intercept,
                "component": real.intercept + real.distance[..., d - int(real.distances[0])],
            }
            table = pd.DataFrame(
                {**index_columns(real.r.shape), **{name: x.flatten().tolist() for name, x in columns.items()}}
            )
            table.insert(1, "layer", spec.layer)
            table.insert(3, "distance", d)
            tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _fit(model: Any, tokens: Tensor, spec: AttentionSpec) -> AdditiveFit:
    """The additive fit of one layer's scores as they are under the hooks that the model has now."""
    if spec.scores is None:
        raise ValueError(
            f"dummy_distance_check needs the scores of layer {spec.layer}, but {spec.architecture} shows only its "
            "pattern"
        )
    (captured,) = stream(model, tokens, [spec], vectors=False)
    assert captured.scores is not None
    return fit_additive(captured.scores, mask="causal" if spec.causal else "full", window=spec.window)


def _correlation(a: AdditiveFit, b: AdditiveFit, part: str) -> Float64[Tensor, "*batch"]:
    """Correlation of one component of two fits, each coefficient weighted by its number of cells."""
    weights = a.mask.double().sum(-2 if part == "key" else -1)
    return _pearson(getattr(a, part), getattr(b, part), weights)


def _pearson(
    x: Float64[Tensor, "*batch n"], y: Float64[Tensor, "*batch n"], weights: Float64[Tensor, "*weight n"]
) -> Float64[Tensor, "*batch"]:
    total = weights.sum(-1, keepdim=True)
    x, y = (v - (v * weights).sum(-1, keepdim=True) / total for v in (x, y))
    return (weights * x * y).sum(-1) / ((weights * x * x).sum(-1) * (weights * y * y).sum(-1)).sqrt()
