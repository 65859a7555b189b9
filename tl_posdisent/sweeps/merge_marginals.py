"""Marginal sums of scores as a table, so that texts read by many workers are fitted together as by one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.fit import fit_marginals
from tl_posdisent.additive.marginals import Marginals, read_marginals
from tl_posdisent.additive.masks import make_cells
from tl_posdisent.additive.result import AdditiveFit, TablePart
from tl_posdisent.models.capture import stream
from tl_posdisent.models.forward import check_tokens
from tl_posdisent.models.spec import read_layers

from .groups import by_model


def marginals_by_layer(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    *,
    layers: Iterable[int] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """All that ``additivity(..., pool=True)`` needs of a text, in a form that texts can be pooled from.

    Args:
        model, tokens, layers, progress: as in ``additivity``. Cells are those of each layer's own mask.

    Returns:
        One row per layer, text and head: ``layer``, ``batch``, ``head``, ``pivot`` (about the mean score), ``squares``
        (sum of squares of ``score - pivot``), ``sums`` (of ``score - pivot`` over the cells of each distance, then each
        query, then each key; float64), ``length``, ``causal``, ``window`` (0: none).

    Raises:
        ValueError: what ``additivity`` refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, marginals_by_layer
        >>> table = marginals_by_layer(load_demo_model(), demo_tokens(length=64), layers=[4], progress=False)
        >>> len(table), len(table["sums"][0])
        (8, 192)
    """
    specs = read_layers(model, layers)
    tokens = check_tokens(model, tokens)
    tables, length = [], tokens.shape[1]
    with (
        closing(stream(model, tokens, specs, vectors=False)) as run,
        tqdm(total=len(specs), desc="layers", disable=not progress) as bar,
    ):
        for layer in run:
            assert layer.scores is not None
            causal, window, scores = layer.spec.causal, layer.spec.window, layer.scores
            cells = make_cells(scores.shape, "causal" if causal else "full", window, device=scores.device)
            with torch.no_grad():
                read = read_marginals(scores, cells)
            rows = [
                (layer.layer, text, head, read.pivot[text, head].item(), read.squares[text, head].item(), sums)
                for text, heads in enumerate(read.sums.cpu().numpy())
                for head, sums in enumerate(heads)
            ]
            table = pd.DataFrame(rows, columns=["layer", "batch", "head", "pivot", "squares", "sums"])
            tables.append(table.assign(length=length, causal=causal, window=window or 0))
            del layer, scores  # make room for those of the next
            bar.update()
    return pd.concat(tables, ignore_index=True)


def merge_additivity(table: pd.DataFrame, part: TablePart = "summary") -> pd.DataFrame:
    """``additivity(..., pool=True)`` of all texts together, from what was measured text by text.

    Args:
        table: what ``marginals_by_layer`` returned, for one text or (by ``sweep``, or ``pandas.concat``) for many of
            one length; of any number of models and checkpoints. Rows of other experiments are left out.
        part: ``"summary"``, or the coefficients of the ``"distance"``, ``"query"`` or ``"key"`` component.

    Returns:
        The columns of ``additivity`` (or of ``AdditiveFit.to_frame(part)`` with ``layer``), with ``model``,
        ``checkpoint`` and ``step`` in front if the table has them. The figures are those of one process, to rounding.

    Raises:
        ValueError: another table; texts of several lengths, or a text that lacks heads of a layer.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model, marginals_by_layer, merge_additivity
        >>> model, tokens = load_demo_model(), demo_tokens(length=128).reshape(4, 32)
        >>> parts = pd.concat([marginals_by_layer(model, row[None], layers=[2], progress=False) for row in tokens])
        >>> whole = additivity(model, tokens, layers=[2], pool=True, progress=False)
        >>> bool((merge_additivity(parts) - whole).abs().max().max() < 1e-9)
        True
    """
    whole = {"layer", "head", "pivot", "squares", "sums", "causal", "window"} <= set(table.columns)
    if not whole or not table["sums"].notna().any():
        raise ValueError(f"table must be what marginals_by_layer returns, got columns {list(table.columns)}")
    merged = []
    for front, of_model in by_model(table[table["sums"].notna()]):
        for layer, rows in of_model.groupby("layer", sort=False):
            fit = _pooled(rows, layer).to_frame(part)
            fit.insert(list(fit.columns).index("head"), "layer", layer)
            merged.append(pd.concat([pd.DataFrame([front] * len(fit)), fit], axis=1))
    return pd.concat(merged, ignore_index=True)


def _pooled(rows: pd.DataFrame, layer: Any) -> AdditiveFit:
    """One layer's fit of all its texts: as many as there are rows for each head."""
    for name in ("length", "causal", "window"):
        if len(values := rows[name].unique()) > 1:
            raise ValueError(f"texts must have one {name} to be pooled, got {values.tolist()} in layer {layer}")
    length, heads = int(rows["length"].iloc[0]), rows["head"].nunique()
    rows = rows.assign(text=rows.groupby("head").cumcount()).sort_values(["text", "head"], kind="stable")
    texts, left = divmod(len(rows), heads)
    if left:
        raise ValueError(f"every text must have all {heads} heads of layer {layer}, got {len(rows)} rows")
    window = int(rows["window"].iloc[0]) or None
    cells = make_cells((length, length), "causal" if bool(rows["causal"].iloc[0]) else "full", window)

    def stacked(name: str, *shape: int) -> Tensor:
        return torch.from_numpy(np.stack(rows[name].to_list()).astype(np.float64)).view(texts, heads, *shape)

    read = Marginals(stacked("pivot"), stacked("sums", -1), stacked("squares"))
    return fit_marginals(read, cells, pool=True)
