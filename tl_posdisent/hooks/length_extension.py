"""Hooks for texts beyond the training length: a Λ-shaped window, and position interpolation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.hooks.edits.edits import DistanceMap, Order, PositionScale, ScoreEdit, View
from tl_posdisent.hooks.hook_list import Heads, Hooks, Layers, any_heads, hooks_for, rotation_hooks
from tl_posdisent.utils.validation import check_integer, check_number


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

    The mask is shaped like a Λ (arXiv 2308.16137): query i sees key j if ``j < sinks`` or ``i - j < window``, and
    RoPE sees the distance ``min(i - j, distance_ceiling)``. What the layer's own mask hides stays hidden.

    Args:
        model: a causal model with rotary embeddings. For texts beyond its tables of positions see ``longer_context``.
        sinks: number of keys at the beginning that every query sees; 0 for a plain sliding window.
        window: number of last keys that a query sees, itself included.
        distance_ceiling: in positions. A ceiling of at least the length of the text changes nothing.
        layers: default all that rotate; other layers are not changed.
        heads: query heads, default all.

    Raises:
        ValueError: numbers that are no integers or too small; a layer that is not causal; or what ``swap_positions``
            refuses.

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

    def hide(view: View) -> Tensor:
        query, key = view.own
        at = key[..., None, :]
        hidden = (query[..., :, None] - at >= window) & (at >= sinks)
        return view.scores().masked_fill(hidden if hidden.ndim == 2 else hidden[:, None], -torch.inf)

    call = f"lambda_mask({sinks}, {window}, {distance_ceiling})"
    ceiling = DistanceMap(call, partial(torch.clamp, max=distance_ceiling))
    return hooks_for(chosen, ceiling) + hooks_for(chosen, ScoreEdit(call, hide, Order.HIDE, scores=True, cached=True))


def position_interpolation(model: Any, factor: int | float, *, layers: Layers = None, heads: Heads = None) -> Hooks:
    """Divide all positions by ``factor`` (position interpolation).

    With the factor by which a text exceeds the training length, distances stay in the trained range (arXiv 2306.15595).

    Args:
        model, layers, heads: as in ``swap_positions``. For texts beyond a model's tables see ``longer_context``.
        factor: a positive finite number; below 1 it spreads positions out.

    Raises:
        ValueError: a factor that is no positive finite number, or what ``swap_positions`` refuses.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model, position_interpolation, swap_positions
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> denser = model.run_with_hooks(tokens, fwd_hooks=position_interpolation(model, 2))
        >>> by_hand = model.run_with_hooks(tokens, fwd_hooks=swap_positions(model, torch.arange(48) / 2))
        >>> torch.equal(denser, by_hand)
        True
    """
    check_number("factor", factor, above=0)
    return rotation_hooks(model, layers, heads, PositionScale(f"position_interpolation({factor:g})", float(factor)))
