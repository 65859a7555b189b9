"""The Λ-mask of LM-Infinite: attention to the first and the nearest keys, with a ceiling on distances."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.hooks.edits.rotation_edits import DistanceMap
from tl_posdisent.hooks.edits.score_edits import Order, ScoreEdit, View
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.utils.validation import check_integer


def lambda_mask(
    model: Any,
    sinks: int,
    window: int,
    distance_ceiling: int,
    *,
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Restrict attention to the first and the nearest keys, with a ceiling on distances (LM-Infinite).

    The mask is shaped like a Λ (arXiv 2308.16137): token i of a text sees token j if ``j < sinks`` or
    ``i - j < window``, counted from the text's first token whatever the positions are (padding, ``position_ids``, a KV
    cache, texts packed into a row). RoPE receives the distance ``min(p_i - p_j, distance_ceiling)`` of the positions.
    Keys that the layer's own mask hides stay hidden. A text begins where positions are 0 and no later token sees a key
    before, or at the first slot.

    Args:
        model: a causal model with rotary embeddings. For texts beyond its tables of positions see ``longer_context``.
        sinks: number of keys at the beginning of each text that every query sees; 0 for a plain sliding window.
        window: number of most recent keys that a query sees, including its own.
        distance_ceiling: largest distance, in positions. A ceiling of at least the length of the text changes nothing.
        layers: default all layers with RoPE; other layers are not changed.
        heads: query heads, default all.

    Raises:
        ValueError: numbers that are not integers or are too small; a layer that is not causal; or what
            ``swap_positions`` refuses. While running: a mask that hides the first keys from all later tokens, if
            positions do not tell whether they are padding and other keys would then be the first.

    Example:
        >>> from tl_posdisent import demo_tokens, lambda_mask, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=96)
        >>> with model.hooks(fwd_hooks=lambda_mask(model, 4, 16, 16)):
        ...     _, cache = model.run_with_cache(tokens, names_filter="blocks.2.attn.hook_pattern")
        >>> (cache["pattern", 2][0, 0, 90] > 0).nonzero()[:, 0].tolist()[:6]
        [0, 1, 2, 3, 75, 76]
    """
    for name, value, least in (("sinks", sinks, 0), ("window", window, 1), ("distance_ceiling", distance_ceiling, 1)):
        check_integer(name, value, least)
    chosen = any_heads(model, layers, heads, "lambda_mask")
    for spec, _ in chosen:
        if not spec.causal:
            raise ValueError(
                f"lambda_mask needs causal attention, but layer {spec.layer} of {spec.architecture} is not"
            )

    call = f"lambda_mask({sinks}, {window}, {distance_ceiling})"
    ceiling = DistanceMap(call, partial(torch.clamp, max=distance_ceiling))
    return hooks_for(chosen, ceiling) + hooks_for(chosen, hiding(call, sinks, window, cached=True))


def hiding(call: str, sinks: int, window: int, *, cached: bool = False) -> ScoreEdit:
    """Return the edit that lets a query see only its text's first keys and the most recent ones, its own included."""
    edit = partial(_hide_between, sinks=sinks, window=window)
    return ScoreEdit(call, edit, Order.HIDE, scores=True, counts=True, cached=cached)


def _hide_between(view: View, sinks: int, window: int) -> Tensor:
    assert view.counted is not None
    query, key = view.counted
    at = key[..., None, :]
    hidden = ((query[..., :, None] - at).abs() >= window) & (at >= sinks)
    return view.scores.masked_fill(hidden if hidden.ndim == 2 else hidden[:, None], -torch.inf)
