"""Causal check of the sources of a distance profile: remove a source and measure the profile again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.hook_list import Heads
from tl_posdisent.models.capture import Captured, for_each_layer
from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Texts, Tokens, read_texts
from tl_posdisent.rope.variance_decomposition import Numbers, share_of
from tl_posdisent.utils.validation import check_integer

from .distance_sources import BIAS, DistanceSources, distance_sources
from .qk_readout import residual_hook
from .stream_sources import EMBEDDING, parse_source, tokens_of_source


@torch.no_grad()
def distance_sources_check(
    model: Any,
    tokens: Tokens,
    layer: int,
    *,
    attention_mask: Tensor | None = None,
    distances: Numbers | None = None,
    heads: Heads = None,
    sinks: int = 0,
    top: int = 1,
    progress: bool = True,
) -> pd.DataFrame:
    """Remove the largest sources of a layer's distance profiles and measure what remains of the profiles.

    ``distance_sources`` says which share of a profile goes with a source if all else stays. Here the model runs without
    it, in two ways. *Direct*: what the source has added is subtracted from the stream before the layer, token by token,
    so that only the layer's norms see the difference. *Total*: the source is set to zero where it acts (``hook_z`` of a
    head, ``hook_mlp_out``), so that later layers change too. A mean ablation would be no test, because the profile is
    made of means, which it keeps.

    Args:
        model, tokens, layer, attention_mask, distances, heads, sinks: as in ``distance_sources``.
        top: sources per head, those with the largest absolute share.
        progress: show a bar.

    Returns:
        One row per head and source, the largest share first: ``layer``, ``head``, ``source``, ``share`` of all pairs in
        which it takes part, and what remains of the profile: ``predicted`` (1 − share), ``direct`` and ``total``, the
        slope of the regression of the new profile on the old one over the distances (1: as before, 0: nothing is
        left, negative: reversed). ``total`` is NaN for the embedding and for biases.

    Raises:
        ValueError: what ``distance_sources`` refuses; ``top`` that is no positive integer.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.experiments import distance_sources_check
        >>> table = distance_sources_check(load_demo_model(), demo_tokens(length=96), 1, heads=[3], progress=False)
        >>> table["source"].tolist(), bool((table["direct"] - table["predicted"]).abs().max() < 0.5)
        (['L0 MLP'], True)
    """
    check_integer("top", top, 1)
    reading = read_model(model, [layer])
    model, (spec,) = reading.model, reading.rotary([layer], "distance_sources")
    texts = read_texts(model, tokens, attention_mask)
    found = distance_sources(
        reading, tokens, layer, attention_mask=attention_mask, distances=distances, heads=heads, sinks=sinks
    )
    table = found.to_frame("source")
    table = table[table["source"] != BIAS].groupby("head", sort=False).head(top).drop(columns="error")
    place = {head: at for at, head in enumerate(found.heads)}
    remaining: dict[str, list[list[float]]] = {}
    for source in tqdm(list(dict.fromkeys(table["source"])), desc="sources", disable=not progress):
        ways: list[Callable[[Tensor], list[Hook] | None]] = [
            partial(_subtraction, model, spec.layer, source),
            partial(_ablation, model, source),
        ]
        remaining[source] = [_slopes(model, spec, texts, found, sinks, hooks) for hooks in ways]
    rows = list(zip(table["source"], table["head"], strict=True))
    table = table.assign(predicted=1 - table["share"])
    for number, column in enumerate(("direct", "total")):
        table[column] = [remaining[source][number][place[head]] for source, head in rows]
    return table.reset_index(drop=True)


def _slopes(
    model: Any,
    spec: AttentionSpec,
    texts: Texts,
    found: DistanceSources,
    sinks: int,
    hooks_for: Callable[[Tensor], list[Hook] | None],
) -> list[float]:
    """What remains of each head's profile under hooks, made for the tokens of each group; NaN where there are none."""
    heads, keys = list(found.heads), [spec.key_head(head) for head in found.heads]
    count = sum(length - sinks for length in texts.lengths)
    query = key = torch.zeros(())
    for group in texts.groups:
        hooks = hooks_for(group.tokens)
        if hooks is None:
            return [float("nan")] * len(heads)
        captured: list[Captured] = []
        with applied(model, hooks):
            for_each_layer(model, group.tokens, [spec], captured.append, scores=False)
        query = query + captured[0].q[:, sinks:, heads].double().sum((0, 1)) / count
        key = key + captured[0].k[:, sinks:, keys].double().sum((0, 1)) / count
    old, new = (x - x.mean(-1, keepdim=True) for x in (found.profile(), found.profile_of(query, key)))
    return share_of((old * new).sum(-1), old.square().sum(-1)).tolist()


def _subtraction(model: Any, layer: int, source: str, tokens: Tensor) -> list[Hook]:
    """Subtract what a source has added from the stream before a layer."""
    part = tokens_of_source(model, tokens, source)
    return [(residual_hook(layer), lambda x, hook: x - part.to(x))]


def _ablation(model: Any, source: str, tokens: Tensor) -> list[Hook] | None:
    """Set a source to zero where it acts; None for the embedding and biases."""
    layer, head, part = (0, None, None) if source == EMBEDDING else parse_source(source)
    if head is not None:
        return ablate_heads(model, [(layer, head)])
    return [(f"blocks.{layer}.hook_mlp_out", lambda x, hook: torch.zeros_like(x))] if part == "MLP" else None
