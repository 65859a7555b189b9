"""Hooks for texts beyond the training length: a Λ-shaped window, and position interpolation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tl_posdisent.hooks.planning.chosen_heads import Heads, Layers, rotary_heads
from tl_posdisent.hooks.planning.planner import hooks_for
from tl_posdisent.hooks.planning.rotation_edits import PositionScale
from tl_posdisent.hooks.planning.score_edits import Order, ScoreEdit, View
from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.utils.validation import check_integer, check_number

_CELLS_PER_BLOCK = 2**22


def lambda_mask(
    model: Any,
    n_sink: int,
    window: int,
    distance_ceiling: int,
    *,
    layers: Layers = None,
    heads: Heads = None,
) -> list[Hook]:
    """Restrict attention to the first and the nearest keys, with a ceiling on distances (LM-Infinite).

    The mask is shaped like a Λ (arXiv 2308.16137): query i sees key j if ``j < n_sink`` or ``i - j < window``, and
    RoPE sees the distance ``min(i - j, distance_ceiling)``. What the layer's own mask hides stays hidden. Up to the
    ceiling the model's own scores are kept; beyond it a score is a plain product of the query, turned to the ceiling,
    with the key, not turned, and only where the mask leaves such cells. The cost is that of a forward pass or two.

    Args:
        model: a causal model with rotary embeddings. For texts beyond its tables of positions see ``longer_context``.
        n_sink: number of keys at the beginning that every query sees; 0 for a plain sliding window.
        window: number of last keys that a query sees, itself included.
        distance_ceiling: in positions. A ceiling of at least the length of the text changes nothing.
        layers: default all that rotate; other layers are not changed.
        heads: query heads, default all.

    Returns:
        ``[(hook name, function), ...]``.

    Raises:
        ValueError: numbers that are no integers or too small; a model or layer that is not causal, has no rotary
            embeddings or lacks the hooks; layers or heads out of range or repeated. While running: a KV cache that
            was not filled under these hooks, another position intervention on the same head.

    Example:
        >>> from tl_posdisent import demo_tokens, lambda_mask, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=96)
        >>> wide = model.run_with_hooks(tokens, fwd_hooks=lambda_mask(model, 4, 96, 96))
        >>> bool((wide - model(tokens)).abs().max() < 1e-4)  # as long as the text: nothing is hidden
        True
        >>> with model.hooks(fwd_hooks=lambda_mask(model, 4, 16, 16)):
        ...     _, cache = model.run_with_cache(tokens, names_filter="blocks.2.attn.hook_pattern")
        >>> (cache["pattern", 2][0, 0, 90] > 0).nonzero()[:, 0].tolist()
        [0, 1, 2, 3, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90]
    """
    for name, value, least in (("n_sink", n_sink, 0), ("window", window, 1), ("distance_ceiling", distance_ceiling, 1)):
        check_integer(name, value, least)
    chosen = rotary_heads(model, layers, heads, "lambda_mask")
    for spec, _ in chosen:
        if not spec.causal:
            raise ValueError(
                f"lambda_mask needs causal attention, but layer {spec.layer} of {spec.architecture} is not"
            )

    def attend(view: View) -> Tensor:
        return _lambda_scores(view, n_sink, window, distance_ceiling)

    edit = ScoreEdit("lambda_mask", attend, Order.HIDE, scores=True, vectors=True, positions=True, cached=True)
    return hooks_for(chosen, edit)


def position_interpolation(
    model: Any, factor: int | float, *, layers: Layers = None, heads: Heads = None
) -> list[Hook]:
    """Divide all positions by ``factor`` (position interpolation).

    With the factor by which a text exceeds the training length, every distance is within the trained range (arXiv
    2306.15595), but neighbours are nearer than in training. Equals ``swap_positions(model, arange(pos) / factor)``.

    Args:
        model, layers, heads: as in ``swap_positions``. For texts beyond a model's tables see ``longer_context``.
        factor: a positive finite number; below 1 it spreads positions out.

    Returns:
        ``[(hook name, function), ...]``.

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
    edit = PositionScale("position_interpolation", float(factor))
    chosen = rotary_heads(model, layers, heads, "position_interpolation")
    return hooks_for(chosen, edit)


def _lambda_scores(view: View, n_sink: int, window: int, ceiling: int) -> Tensor:
    """The layer's own scores up to the ceiling, those at the ceiling beyond it, ``-inf`` where the Λ hides a key."""
    spec, own, (q, k) = view.spec, view.scores(), view.vectors()
    query, key = view.own
    length = int(key.max()) + 1
    wide = torch.promote_types(q.dtype, torch.float32)
    rotary = spec.require_rotary("lambda_mask")
    far = ceiling + 1 < min(length, spec.window or length)  # else no key is visible beyond the ceiling
    rotation = view.rotation
    if far:
        scale = rotation.scale
        q_far = rotation.turned(
            rotation.kept(q.to(wide), rotary), torch.full_like(query, ceiling) / scale, query, rotary
        )
        n_far = n_sink if window <= ceiling + 1 and key.ndim == 1 else key.shape[-1]
        k_far = rotation.turned(k.to(wide), torch.zeros_like(key), key, rotary)[:, :n_far]
        q_far = q_far * spec.require_scale()
    rows = max(1, _CELLS_PER_BLOCK // max(1, own[..., 0, :].numel()))
    new = torch.empty_like(own)
    for start in range(0, own.shape[-2], rows):
        some = slice(start, start + rows)
        at = key[..., None, :]
        distance = query[..., some, None] - at
        if distance.ndim == 3:  # texts with positions of their own
            distance, at = distance[:, None], at[:, None]
        block = own[:, :, some].masked_fill((distance >= window) & (at >= n_sink), -torch.inf)
        if far:
            beyond = spec.capped(torch.einsum("bqhd,bkhd->bhqk", q_far[:, some], k_far)).to(own.dtype)
            known, beyond_it = block[..., :n_far], distance[..., :n_far] > ceiling
            beyond = torch.where(beyond_it & (known != -torch.inf), beyond, known)
            block = torch.cat([beyond, block[..., n_far:]], -1)
        new[:, :, some] = block
    return new
