"""Mean attention of each head by distance, with and without interventions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.cells import cell_distances
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.hook_list import Chosen, Heads, any_heads
from tl_posdisent.hooks.named_hooks import UNMODIFIED, Interventions, named_hooks
from tl_posdisent.models.capture import of_heads
from tl_posdisent.models.patterns import Pattern, for_each_pattern, pattern_or_scores
from tl_posdisent.models.reading.model_reading import Layers, ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts


def attention_by_distance(
    model: Any,
    tokens: Tokens,
    interventions: Interventions | None = None,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Average the attention of each head by the distance of query and key, with and without interventions.

    An intervention acts on all of its heads at once, so what a layer attends to also changes because the layers before
    it do; hooks of one layer show the effect on that layer alone.

    Args:
        model, attention_mask, layers, heads, progress: as in ``additivity``.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer.
        interventions: as in ``intervention_losses``; None for the unmodified model alone.

    Returns:
        One row per intervention (the first is ``unmodified``), layer, head and distance: ``attention``, the mean weight
        of the pattern over all pairs of a query and a visible key at this distance in all texts, and ``cells``, their
        number. ``attention`` × ``cells`` adds up to the number of queries, unless a head has a learned sink.

    Raises:
        ValueError: what ``intervention_losses`` refuses; a layer that shows neither its pattern nor its scores, or
            whose pattern would not show an edit.
        RuntimeError: a hook that never fired.

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance, load_demo_model
        >>> from tl_posdisent.experiments import attention_by_distance
        >>> model = load_demo_model()
        >>> five = {"every distance 5": dummy_distance(model, 5, layers=[3])}
        >>> table = attention_by_distance(model, demo_tokens(length=64), five, layers=[3], progress=False)
        >>> print(table.query("head == 4 and distance == 1").round(2).to_string(index=False))
            intervention  layer  head  distance  attention  cells
              unmodified      3     4         1       0.21     63
        every distance 5      3     4         1       0.06     63
    """
    reading = read_model(model)
    texts = read_texts(reading.model, tokens, attention_mask)
    chosen = any_heads(reading, layers, heads)
    named = {} if interventions is None else named_hooks(reading.model, interventions)
    for spec, _ in chosen:
        check_shown(spec, [hook for hooks in named.values() for hook in hooks])
    tables = []
    with tqdm(total=1 + len(named), desc="passes", disable=not progress) as bar:
        for name, hooks in {UNMODIFIED: [], **named}.items():
            tables.append(mean_attention(reading, texts, chosen, hooks, whole=bool(hooks)).assign(intervention=name))
            bar.update()
    table = pd.concat(tables, ignore_index=True)
    return reading.note(table[["intervention", "layer", "head", "distance", "attention", "cells"]])


def check_shown(spec: AttentionSpec, hooks: Sequence[Hook]) -> None:
    """Raise if a layer shows no pattern, or one that would not show what these hooks change."""
    pattern_or_scores(spec)
    z = str(spec.taps.z)
    if not spec.taps.scores and any(name(z) if callable(name) else name == z for name, _ in hooks):
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture} discards edited scores, so hooks change what it attends to at "
            f"{spec.taps.z}, behind its pattern: a mean or a picture of it would show nothing of the edit"
        )


def mean_attention(
    reading: ModelReading, texts: Texts, chosen: Chosen, hooks: Sequence[Hook], *, whole: bool
) -> pd.DataFrame:
    """Average the pattern of each chosen head over the cells of each distance, in a run of all texts under hooks.

    Without ``whole``, runs end at the last of these layers: hooks of later ones do not fire.

    Returns:
        One row per layer, head and distance: ``attention`` and ``cells`` as in ``attention_by_distance``;
        ``first_attention``, the sum of the weights of the first key of each text at this distance, and ``first_cells``,
        the number of queries that see it there.
    """
    heads = {spec.layer: of_layer for spec, of_layer in chosen}
    sums = {  # of all keys, and of the first
        layer: torch.zeros(2, len(of_layer), 2 * texts.longest - 1, dtype=torch.float64)
        for layer, of_layer in heads.items()
    }

    def add(spec: AttentionSpec, pattern: Pattern) -> None:
        of_texts = of_heads(pattern, heads[spec.layer]).sum(0, dtype=torch.float64).cpu()
        columns = _columns(texts, pattern.shape[-1])
        of_all, of_first = sums[spec.layer]
        of_all.index_add_(1, columns.flatten(), of_texts.flatten(1))
        of_first.index_add_(1, columns[:, 0], of_texts[:, :, 0])

    with applied(reading.model, hooks):
        for group in texts.groups:
            for_each_pattern(reading.model, group.tokens, [spec for spec, _ in chosen], add, whole=whole)
    return pd.concat([_table(spec, of_layer, texts, sums[spec.layer]) for spec, of_layer in chosen], ignore_index=True)


def _columns(texts: Texts, length: int) -> Int64[Tensor, "query key"]:
    """Return the column of each cell of a text in the sums: distances from −(longest − 1) on."""
    return cell_distances(length, length, "cpu") + texts.longest - 1


def _table(
    spec: AttentionSpec, heads: list[int], texts: Texts, sums: Float64[Tensor, "2 head distance"]
) -> pd.DataFrame:
    """Divide sums by the number of visible cells at each distance; distances without any have no rows."""
    cells, first_cells = torch.zeros(2, sums.shape[-1], dtype=torch.int64)
    for group in texts.groups:
        length, n = group.tokens.shape[1], len(group.tokens)
        places, visible = _columns(texts, length), n * spec.mask(length).long().cpu()
        cells.index_add_(0, places.flatten(), visible.flatten())
        first_cells.index_add_(0, places[:, 0], visible[:, 0])
    seen = cells.nonzero().squeeze(1)
    of_all, of_first = sums[:, :, seen]
    columns = {
        "layer": spec.layer,
        "head": torch.tensor(heads).repeat_interleave(len(seen)),
        "distance": (seen - texts.longest + 1).repeat(len(heads)),
        "attention": (of_all / cells[seen]).flatten(),
        "cells": cells[seen].repeat(len(heads)),
        "first_attention": of_first.flatten(),
        "first_cells": first_cells[seen].repeat(len(heads)),
    }
    return pd.DataFrame(columns)
