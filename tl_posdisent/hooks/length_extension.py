"""Two ways to read texts longer than those of the training, as hooks: a Λ-shaped window, and denser positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.models.forward import Hook
from tl_posdisent.models.probe.observe import mismatch
from tl_posdisent.models.reading import read_rotary_layers
from tl_posdisent.models.spec import AttentionSpec, select
from tl_posdisent.utils.validation import check_integer

from .rotation_edits import Lie, lie_hooks
from .score_edits import View, edit_scores

_CELLS_PER_BLOCK = 2**22


def lambda_mask(
    model: Any,
    n_sink: int,
    window: int,
    distance_ceiling: int,
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
) -> list[Hook]:
    """Hooks of LM-Infinite: a query sees the first keys and the nearest ones, and nothing is further than a ceiling.

    The mask is shaped like a Λ (arXiv 2308.16137): query i sees key j if ``j < n_sink`` or ``i - j < window``, and
    RoPE sees the distance ``min(i - j, distance_ceiling)``. What the layer's own mask hides stays hidden. Up to the
    ceiling the model's own scores are kept; beyond it a score is a plain product of the query, turned to the ceiling,
    with the key, not turned, and only where the mask leaves such cells. The cost is that of a forward pass or two.

    Args:
        model: a causal model with rotary embeddings. For texts beyond its tables of positions see ``longer_context``.
        n_sink: how many keys at the beginning every query sees; 0 for a plain sliding window.
        window: how many of the last keys a query sees, itself included.
        distance_ceiling: in positions. One that is not less than the length of the text changes nothing.
        layers: default all that rotate; other layers attend as they are.
        heads: query heads, default all.

    Returns:
        ``[(hook name, function), ...]``.

    Raises:
        ValueError: numbers that are no integers or too small; a model or layer that is not causal, has no rotary
            embeddings or lacks the hooks; layers or heads out of range or repeated. While running: parts of texts (a
            key/value cache), padding on the left, positions that are not 0, 1, 2 ….

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
    specs = read_rotary_layers(model, layers, "lambda_mask")
    chosen = select("heads", heads, specs[0].n_heads)
    for name, value, least in (("n_sink", n_sink, 0), ("window", window, 1), ("distance_ceiling", distance_ceiling, 1)):
        check_integer(name, value, least)
    hooks: list[Hook] = []
    for spec in specs:
        if not spec.causal:
            raise ValueError(
                f"lambda_mask needs causal attention, but layer {spec.layer} of {spec.architecture} is not"
            )

        def edit(view: View, spec: AttentionSpec = spec) -> Tensor:
            return _lambda_scores(spec, view, n_sink, window, distance_ceiling)

        hooks += edit_scores(spec, chosen, edit, scores=True, vectors=True)
    return hooks


def position_interpolation(
    model: Any, factor: int | float, *, layers: Iterable[int] | None = None, heads: Iterable[int] | None = None
) -> list[Hook]:
    """Hooks under which RoPE sees position ``i`` as ``i / factor``, for texts of any length.

    With the factor by which a text is too long, every distance is one that the model knows (arXiv 2306.15595), at the
    price that neighbours are nearer than they ever were. The same as ``swap_positions(model, arange(pos) / factor)``.

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
    specs = read_rotary_layers(model, layers, "position_interpolation")
    finite = isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor - factor == 0
    if not finite or factor <= 0:
        raise ValueError(f"factor must be a positive finite number, got {factor!r}")

    def place(length: int, device: torch.device) -> Tensor:
        return (torch.arange(length, dtype=torch.float64) / factor).to(device)

    return lie_hooks(specs, Lie(place, place), heads)


def _lambda_scores(spec: AttentionSpec, view: View, n_sink: int, window: int, ceiling: int) -> Tensor:
    """The layer's own scores up to the ceiling, those at the ceiling beyond it, ``-inf`` where the Λ hides a key."""
    own, (q, k) = view.scores(), view.vectors()
    length = own.shape[-1]
    if not bool(view.inside[..., 0, 0].all()):
        raise ValueError(f"in layer {spec.layer} the first token is masked: run the model without padding on the left")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    far = ceiling + 1 < min(length, spec.window or length)  # else no key is visible beyond the ceiling
    n_far = (n_sink if window <= ceiling + 1 else length) if far else 0
    at = torch.full((length,), ceiling, device=q.device)
    q_far = spec.rotated(q.to(wide), at) * spec.require_scale() if far else q
    k_far = spec.rotated(k.to(wide), torch.zeros_like(at))[:, :n_far] if far else k[:, :0]
    if far:
        _check_ceiling(spec, view, q_far, k.to(wide), ceiling)
    rows = max(1, _CELLS_PER_BLOCK // max(1, own[..., 0, :].numel()))
    key = torch.arange(length, device=own.device)
    new = torch.empty_like(own)
    for start in range(0, length, rows):
        some = slice(start, start + rows)
        distance = key[some, None] - key
        block = own[:, :, some].masked_fill((distance >= window) & (key >= n_sink), -torch.inf)
        if far:
            beyond = spec.capped(torch.einsum("bqhd,bkhd->bhqk", q_far[:, some], k_far)).to(own.dtype)
            known = block[..., :n_far]
            hidden = known == -torch.inf
            beyond = torch.where((distance[:, :n_far] > ceiling) & ~hidden, beyond, known)
            block = torch.cat([beyond, block[..., n_far:]], -1)
        new[:, :, some] = block
    return new


def _check_ceiling(spec: AttentionSpec, view: View, q_far: Tensor, k: Tensor, ceiling: int) -> None:
    """At the ceiling itself the layer's own scores and the recomputed ones must meet."""
    k_far = spec.rotated(k, torch.zeros(k.shape[1], device=k.device))
    ours = spec.capped((q_far[:, ceiling:] * k_far[:, :-ceiling]).sum(-1)).transpose(1, 2)
    own, inside = (x.diagonal(-ceiling, -2, -1) for x in (view.scores(), view.inside))
    inside = inside.expand(own.shape)
    if mismatch(own[inside].detach(), ours[inside].detach(), k.dtype) > 1:
        raise ValueError(
            f"scores of layer {spec.layer} at distance {ceiling} are not those that its queries, keys and rotation "
            "give: run the model without padding, position_ids or a rotation that changes with the length, and lie to "
            "each head once"
        )
