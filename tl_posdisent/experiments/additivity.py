"""How additive are the scores of every head of a model on a text? The headline measurement of arXiv 2503.13305."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.lens.attention import read_layers
from tl_posdisent.lens.capture import stream
from tl_posdisent.lens.run import check_tokens
from tl_posdisent.maths.additive import fit_additive
from tl_posdisent.maths.masks import MaskKind


def additivity(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    *,
    layers: Iterable[int] | None = None,
    mask: MaskKind | Bool[Tensor, "query key"] | None = None,
    pool: bool = False,
    progress: bool = True,
) -> pd.DataFrame:
    """Fit the three-axis model to every head's scores: one forward pass, one layer in memory.

    Args:
        model: HookedTransformer, TransformerBridge or alike. Rotary embeddings are not needed: GPT-2 and ALiBi models
            are fitted too.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer.
        layers: default all.
        mask: which cells count; by default each layer's own (causal or full, with its sliding window). A boolean
            ``[query, key]`` narrows it, for instance to leave the first positions out.
        pool: one distance profile per head for all texts, each text with its own query and key part.
        progress: show a bar.

    Returns:
        One row per text (unless pooled), layer and head: ``batch``, ``layer``, ``head``, ``r``, ``r2``,
        ``r2_adjusted``, and ``share_distance``, ``share_query``, ``share_key``, the share of the scores' variance that
        each axis explains alone (see ``AdditiveFit``). The paper's figure is the mean of ``r``. Set
        ``random_control`` beside it.

    Raises:
        ValueError: unusable tokens, layers or mask; a model whose scores cannot be seen, or whose captured queries
            and keys do not explain its scores.

    Example:
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model
        >>> table = additivity(load_demo_model(), demo_tokens(length=128), progress=False)
        >>> len(table), bool(table["r"].mean() > 0.8)  # 5 layers of 8 heads
        (40, True)
    """
    specs = read_layers(model, layers)
    tokens = check_tokens(model, tokens)
    tables = []
    bar = tqdm(stream(model, tokens, specs), total=len(specs), desc="layers", disable=not progress)
    for layer in bar:
        assert layer.scores is not None
        spec = layer.spec
        cells = mask if mask is not None else ("causal" if spec.causal else "full")
        fit = fit_additive(layer.scores, mask=cells, window=spec.window if mask is None else None, pool=pool)
        table = fit.to_frame()
        table.insert(len(table.columns) - 7, "layer", layer.layer)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)
