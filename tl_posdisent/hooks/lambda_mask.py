"""The Λ-mask of LM-Infinite: attention to the first and the nearest keys, with a ceiling on distances."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posdisent.hooks.edit import Hidden
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.utils.validation import check_integer


def lambda_mask(
    model: Any,
    sinks: int,
    window: int,
    distance_ceiling: int | None = None,
    *,
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Restrict attention to the first and the nearest keys, with a ceiling on distances (LM-Infinite).

    The mask is shaped like a Λ (arXiv 2308.16137): token i of a text sees token j if ``j < sinks`` or
    ``|i - j| < window``, counted from the text's first token. The distance is absolute: in the two-way prefix of a
    prefix LM, a key ahead is as near as one behind. RoPE receives the distance ``min(D, distance_ceiling)``, where D is
    that of the tokens, or that of another intervention on the head. Keys that the layer's own mask hides stay hidden.

    Args:
        model: a causal model with rotary embeddings. For texts beyond its context load it with a larger ``n_ctx``.
        sinks: number of keys at the beginning of each text that every query sees; 0 for a plain sliding window.
        window: number of most recent keys that a query sees, including its own, and as many ahead in a two-way prefix.
        distance_ceiling: largest distance, in positions; None for no ceiling.
        layers: default all layers with RoPE; other layers are not changed.
        heads: query heads, default all.

    Raises:
        ValueError: numbers that are not integers or are too small; a layer that is not causal; or what
            ``swap_positions`` refuses. While running: a row whose first keys are hidden, such as one that is padded on
            the left, unless ``sinks=0``.

    Example:
        >>> from tl_posdisent import demo_tokens, lambda_mask, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=96)
        >>> with model.hooks(fwd_hooks=lambda_mask(model, 4, 16, 16)):
        ...     _, cache = model.run_with_cache(tokens, names_filter="blocks.2.attn.hook_pattern")
        >>> (cache["pattern", 2][0, 0, 90] > 0).nonzero()[:, 0].tolist()[:6]
        [0, 1, 2, 3, 75, 76]
    """
    check_integer("sinks", sinks, 0)
    check_integer("window", window, 1)
    if distance_ceiling is not None:
        check_integer("distance_ceiling", distance_ceiling, 1)
    chosen = any_heads(model, layers, heads, "lambda_mask")
    for spec, _ in chosen:
        if not spec.causal:
            raise ValueError(
                f"lambda_mask needs causal attention, but layer {spec.layer} of {spec.architecture} is not"
            )

    call = f"lambda_mask({sinks}, {window}{'' if distance_ceiling is None else f', {distance_ceiling}'})"
    between = Hidden(call, partial(_between, sinks, window), from_start=sinks > 0)
    if distance_ceiling is None:
        return hooks_for(chosen, call, hide=(between,))
    return hooks_for(chosen, call, ceiling=float(distance_ceiling), hide=(between,))


def _between(sinks: int, window: int, texts: int, length: int, device: torch.device) -> Bool[Tensor, "query key"]:
    """Find the keys between a text's first and the most recent ones."""
    slot = torch.arange(length, device=device)
    return ((slot[:, None] - slot).abs() >= window) & (slot >= sinks)
