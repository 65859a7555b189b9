"""How additive are the scores of every head of a model on a text? The headline measurement of arXiv 2503.13305."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.lens.attention import AttentionSpec, read_layers
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

    ``scores[i, j] ≈ intercept + distance[i - j] + query[i] + key[j]``, on the scores as they are in this text.
    Hooks that the model has, such as interventions of this package, act on the scores that are fitted.

    Args:
        model: HookedTransformer, TransformerBridge or alike. Rotary embeddings are not needed: GPT-2 and ALiBi models
            are fitted too.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer.
        layers: default all.
        mask: which cells count; by default each layer's own (causal or full, with its sliding window), which a
            boolean ``[query, key]`` narrows, for instance to leave the first positions out.
        pool: one distance profile per head for all texts, each text with its own query and key part.
        progress: show a bar.

    Returns:
        One row per text (unless pooled), layer and head: ``batch``, ``layer``, ``head``, ``r``, ``r2``,
        ``r2_adjusted``, and ``share_distance``, ``share_query``, ``share_key``, the share of the scores' variance that
        each axis explains alone (see ``AdditiveFit``). The headline is the mean of ``r``. Set
        ``random_control`` beside it.

    Raises:
        ValueError: unusable tokens, layers or mask; padded texts; a model whose scores neither show nor can be
            recomputed from its queries and keys.

    Example:
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model
        >>> table = additivity(load_demo_model(), demo_tokens(length=128), progress=False)
        >>> by_layer = table.groupby("layer")["r"].mean()  # 5 layers of 8 heads
        >>> len(table), bool(by_layer[0] < 0.4), bool(by_layer[4] > 0.8)
        (40, True, True)
    """
    specs = read_layers(model, layers)
    tokens = check_tokens(model, tokens)
    if isinstance(mask, Tensor) and (mask.dtype != torch.bool or mask.shape != (tokens.shape[1],) * 2):
        raise ValueError(
            f"mask must be a boolean tensor of shape (query, key) = {(tokens.shape[1],) * 2}, got {mask.dtype} of "
            f"shape {tuple(mask.shape)}"
        )
    tables = []
    with (
        closing(stream(model, tokens, specs, vectors=False)) as run,
        tqdm(total=len(specs), desc="layers", disable=not progress) as bar,
    ):
        for layer in run:
            assert layer.scores is not None
            fit = fit_additive(layer.scores, pool=pool, **_cells(layer.spec, mask, tokens.shape[1]))
            table = fit.to_frame()
            table.insert(list(table.columns).index("head"), "layer", layer.layer)
            tables.append(table)
            del layer  # its scores make room for those of the next
            bar.update()
    return pd.concat(tables, ignore_index=True)


def _cells(spec: AttentionSpec, mask: MaskKind | Tensor | None, length: int) -> dict[str, Any]:
    """Mask and window for ``fit_additive``."""
    if mask is None:
        return {"mask": "causal" if spec.causal else "full", "window": spec.window}
    if isinstance(mask, Tensor):
        return {"mask": mask & spec.mask(length, mask.device)}
    return {"mask": mask}
