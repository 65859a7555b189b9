"""How additive are the scores of every head of a model on a text? The headline measurement of arXiv 2503.13305."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.cells import Cells, MaskKind, make_cells
from tl_posdisent.additive.fit import fit_additive, fit_marginals
from tl_posdisent.additive.marginals import Marginals, add_rows, no_marginals
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.models.capture import stream
from tl_posdisent.models.chunked_scores import read_blocks
from tl_posdisent.models.forward import check_tokens
from tl_posdisent.models.memory import require_room
from tl_posdisent.models.reading import read_layers
from tl_posdisent.models.spec import AttentionSpec


def additivity(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    *,
    layers: Iterable[int] | None = None,
    mask: MaskKind | Bool[Tensor, "query key"] | None = None,
    pool: bool = False,
    block: int | None = None,
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
        block: run this many queries at a time, with a cache of keys and values: for texts whose score matrices do not
            fit (``estimate`` says so). The same numbers, to rounding; the model must have no hooks of yours.
        progress: show a bar.

    Returns:
        One row per text (unless pooled), layer and head: ``batch``, ``layer``, ``head``, ``r``, ``r2``,
        ``r2_adjusted``, and ``share_distance``, ``share_query``, ``share_key``, the share of the scores' variance that
        each axis explains alone (see ``AdditiveFit``). The headline is the mean of ``r``. Set
        ``random_control`` beside it.

    Raises:
        ValueError: unusable tokens, layers or mask; padded texts; a model whose scores neither show nor can be
            recomputed from its queries and keys; ``block`` with a model that has hooks, takes no cache, or whose
            queries see later keys.
        MemoryError: one layer's scores alone are more than the memory that is free.

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
    require_room(model, len(tokens) * max(spec.n_heads for spec in specs), tokens.shape[1], block)
    chosen = [_cells(spec, mask, tokens.shape[1]) for spec in specs]
    fits = (
        _whole(model, tokens, specs, chosen, pool)
        if block is None
        else _by_block(model, tokens, specs, chosen, pool, block)
    )
    tables = []
    with closing(fits), tqdm(total=len(specs), desc="layers", disable=not progress) as bar:
        for layer, fit in fits:
            table = fit.to_frame()
            table.insert(list(table.columns).index("head"), "layer", layer)
            tables.append(table)
            bar.update()
    return pd.concat(tables, ignore_index=True)


Fits = Generator[tuple[int, AdditiveFit], None, None]


def _whole(model: Any, tokens: Tensor, specs: list[AttentionSpec], chosen: list[dict[str, Any]], pool: bool) -> Fits:
    """Each layer's fit while the forward pass waits."""
    cells = {spec.layer: some for spec, some in zip(specs, chosen, strict=True)}
    with closing(stream(model, tokens, specs, vectors=False)) as run:
        for layer in run:
            assert layer.scores is not None
            fit = fit_additive(layer.scores, pool=pool, **cells[layer.layer])
            number = layer.layer
            del layer  # its scores make room for those of the next
            yield number, fit


def _by_block(
    model: Any, tokens: Tensor, specs: list[AttentionSpec], chosen: list[dict[str, Any]], pool: bool, block: int
) -> Fits:
    """All layers' fits, from marginals that were added up block by block."""
    if any(options["mask"] == "full" for options in chosen if isinstance(options["mask"], str)):
        raise ValueError('block must be None with mask="full": a cache holds the keys before a query')
    n = tokens.shape[1]
    of_layer = {spec.layer: some for spec, some in zip(specs, chosen, strict=True)}
    cells: dict[int, Cells] = {}
    sums: dict[int, Marginals] = {}

    def add(spec: AttentionSpec, first: int, scores: Tensor) -> None:
        batch, seen, options = scores.shape[:2], scores.shape[-1], dict(of_layer[spec.layer])
        if spec.layer not in sums:
            cells[spec.layer] = make_cells((*batch, n, n), device=scores.device, **options)
            sums[spec.layer] = no_marginals(batch, cells[spec.layer])
        if isinstance(options["mask"], Tensor):
            options["mask"] = options["mask"][first:seen, :seen]
            if not bool(options["mask"].any()):
                return
        part = make_cells(scores.shape, device=scores.device, **options)
        sums[spec.layer] = add_rows(sums[spec.layer], scores, part, cells[spec.layer], first=first)

    read_blocks(model, tokens, specs, block, add)
    for spec in sorted(specs, key=lambda spec: spec.layer):
        yield spec.layer, fit_marginals(sums.pop(spec.layer), cells[spec.layer], pool=pool)


def _cells(spec: AttentionSpec, mask: MaskKind | Tensor | None, length: int) -> dict[str, Any]:
    """Mask and window for ``fit_additive``."""
    if mask is None:
        return {"mask": "causal" if spec.causal else "full", "window": spec.window}
    if isinstance(mask, Tensor):
        return {"mask": mask & spec.mask(length, mask.device)}
    return {"mask": mask}
