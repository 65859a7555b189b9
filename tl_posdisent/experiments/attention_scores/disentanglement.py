"""Disentanglement of position and content in every head, in one table for any position encoding and checkpoint."""

from __future__ import annotations

from typing import Any

import pandas as pd
from torch import Tensor

from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.texts import Tokens, read_texts

from .additivity import additivity
from .controlled_distance import controlled_distance

_CONTROLLED = ["r_three_axis", "r_two_axis"]


def disentanglement(
    model: Any, tokens: Tokens, *, attention_mask: Tensor | None = None, sinks: int = 0, progress: bool = True
) -> pd.DataFrame:
    """Measure r of every head's scores: of the text, and three-axis and two-axis at controlled distances.

    The columns are the same whatever the encoding: tables of several models or checkpoints can be concatenated.

    Args:
        model, tokens, attention_mask, progress: as in ``additivity``.
        sinks: positions to leave out of ``controlled_distance``.

    Returns:
        One row per layer and head: ``layer``, ``head``; ``r`` of ``additivity`` with ``pool``; ``r_three_axis`` and
        ``r_two_axis`` of ``controlled_distance`` over all distances that the layer's mask leaves. NaN where scores do
        not vary, or a layer's rotation cannot be controlled.

    Raises:
        ValueError: as ``additivity``.

    Example:
        >>> from tl_posdisent import demo_tokens, disentanglement, load_demo_model
        >>> table = disentanglement(load_demo_model(), demo_tokens(length=128), progress=False)
        >>> table.columns.tolist(), len(table)
        (['layer', 'head', 'r', 'r_three_axis', 'r_two_axis'], 40)
    """
    reading = read_model(model)
    texts = read_texts(reading.model, tokens, attention_mask)
    batch: dict[str, Any] = {"tokens": texts, "progress": progress}
    table = additivity(reading, pool=True, **batch)[["layer", "head", "r"]]
    layers: dict[tuple[int, ...], list[int]] = {}  # by the distances that their masks leave
    for spec in reading.specs():
        if spec.rotary is not None and not spec.no_rotation and not spec.problem:
            first = 0 if spec.causal else 1 - texts.longest
            left = tuple(d for d in range(first, texts.longest) if spec.window is None or abs(d) < spec.window)
            layers.setdefault(left, []).append(spec.layer)
    tables = [
        controlled_distance(reading, distances=distances, layers=some, sinks=sinks, **batch)
        for distances, some in layers.items()
    ]
    if not tables:
        return reading.note(table.assign(**dict.fromkeys(_CONTROLLED, float("nan"))))
    controlled = pd.concat(tables)[["layer", "head", *_CONTROLLED]]
    return reading.note(table.merge(controlled, on=["layer", "head"], how="left", validate="one_to_one"))
