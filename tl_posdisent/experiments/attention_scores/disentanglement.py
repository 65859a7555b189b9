"""How nearly a model's heads disentangle position and content, in one table for any encoding and any checkpoint."""

from __future__ import annotations

from typing import Any

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.forward import check_tokens
from tl_posdisent.models.reading import read_layers

from .additivity import additivity
from .controlled_distance import controlled_distance

_CONTROLLED = ["r_three_axis", "r_two_axis"]


def disentanglement(
    model: Any, tokens: Int[Tensor, "batch pos"] | str, *, burn_in: int = 0, progress: bool = True
) -> pd.DataFrame:
    """Both r of every head where distance can be controlled, and the r of the observed scores everywhere.

    The same columns whatever the encoding, so that tables of several models, or of the checkpoints of one training
    (``dynamics``), can be put one below the other.

    Args:
        model: HookedTransformer, TransformerBridge or alike.
        tokens: ids ``[batch, pos]`` without padding, or text if the model has a tokenizer.
        burn_in: positions to leave out of ``controlled_distance`` at the beginning.
        progress: show bars.

    Returns:
        One row per layer and head: ``layer``, ``head``; ``r``, of the three-axis fit of the scores as they are in the
        texts, with one distance profile for all of them (``additivity`` with ``pool``); ``r_three_axis`` and
        ``r_two_axis`` of ``controlled_distance`` over all distances that the layer's mask leaves, NaN in layers
        without rotary embeddings that can be controlled. NaN too where scores do not vary.

    Raises:
        ValueError: as ``additivity``.

    Example:
        >>> from tl_posdisent import demo_tokens, disentanglement, load_demo_model
        >>> table = disentanglement(load_demo_model(), demo_tokens(length=128), progress=False)
        >>> table.columns.tolist(), len(table)
        (['layer', 'head', 'r', 'r_three_axis', 'r_two_axis'], 40)
    """
    tokens = check_tokens(model, tokens)
    table = additivity(model, tokens, pool=True, progress=progress)[["layer", "head", "r"]]
    length, tables = tokens.shape[1], []
    for spec in read_layers(model):
        if spec.rotary is None or spec.no_rotation or spec.problem:
            continue
        first = 0 if spec.causal else 1 - length
        distances = [d for d in range(first, length) if spec.window is None or abs(d) < spec.window]
        tables.append(
            controlled_distance(
                model, tokens, distances=distances, layers=[spec.layer], burn_in=burn_in, progress=progress
            )
        )
    if not tables:
        return table.assign(**dict.fromkeys(_CONTROLLED, float("nan")))
    controlled = pd.concat(tables)[["layer", "head", *_CONTROLLED]]
    return table.merge(controlled, on=["layer", "head"], how="left", validate="one_to_one")
