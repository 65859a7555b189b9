"""Position interventions on RoPE: other positions, one distance, a function of the distance, texts beyond the context.

Each function returns a list for ``model.hooks(fwd_hooks=...)``, ``run_with_hooks`` or ``applied``. Add lists,
``a + b``, to combine interventions: at most one position intervention acts on a head.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for
from tl_posdisent.hooks.rotated_scores import mapped
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tensor_checks import real_tensor
from tl_posdisent.utils.validation import check_number, listed, shown
from tl_posdisent.utils.words import plural

Positions = Tensor | Sequence[float] | Callable[[Tensor], Tensor]
"""One position for each slot of the batch, or a function of the tokens' own positions."""


def swap_positions(
    model: Any,
    positions: Positions,
    *,
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Replace the positions that RoPE receives.

    The score of query i and key j becomes what it would be at the distance ``positions[i] - positions[j]``.
    Only the rotation changes, not the mask; on Hugging Face models the result is the same as with
    ``position_ids=positions``, unless these exceed the original context of a model whose frequencies depend on the
    length of the text (longrope, dynamic NTK) or that scales scores by the position (Ministral 3): frequencies and
    scale remain those of the running text.

    Args:
        model: a model with rotary embeddings.
        positions: ``(pos,)`` or ``(batch, pos)``, finite real numbers, one for each slot of the batch, padding
            included; or a function from a float64 tensor of the tokens' own positions 0, 1, 2 … to one of the same
            shape, for texts of any length.
        layers: default all layers with RoPE.
        heads: query heads, default all. A head that shares its keys with others gets its own rotated copy of them.

    Raises:
        ValueError: a model or layer without rotary embeddings or without the hooks for the edit; positions of wrong
            rank, not finite or given as pairs; layers or heads out of range or repeated. While running: positions whose
            length differs from the text's; a KV cache; a text longer than the model's original context, if it is then
            rotated or scaled otherwise (longrope, dynamic NTK, Ministral 3); ``position_ids`` with gaps; a function, in
            a row whose first keys are hidden, such as one that is padded on the left: its positions are ambiguous.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model, swap_positions
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> shifted = model.run_with_hooks(tokens, fwd_hooks=swap_positions(model, torch.arange(48) + 100))
        >>> bool(torch.allclose(shifted, model(tokens), atol=1e-3))  # only differences matter
        True
    """
    layers, heads = listed("layers", layers), listed("heads", heads)
    given = check_positions(positions)
    if isinstance(given, Tensor):
        call = f"swap_positions({'×'.join(map(str, given.shape))} positions)"
    else:
        call = f"swap_positions({getattr(given, '__name__', 'a function')})"
    return hooks_for(any_heads(model, layers, heads, "swap_positions"), call, positions=given)


def check_positions(positions: Positions) -> Tensor | Callable[[Tensor], Tensor]:
    """Validate ``positions``, and return them as a tensor or a function."""
    if callable(positions) and not isinstance(positions, Tensor):
        return positions
    if isinstance(positions, Sequence) and any(isinstance(x, tuple) and len(x) == 2 for x in positions):
        raise ArgumentError(
            "positions",
            f"must be one position for each token, (pos,) or (batch, pos), or a function of them, got pairs, "
            f"{shown(positions)}: to exchange those of tokens i and j, p = torch.arange(n); p[[i, j]] = p[[j, i]]",
        )
    given = real_tensor("positions", positions)
    if given.ndim not in (1, 2) or given.numel() == 0:
        raise ArgumentError("positions", f"must have shape (pos,) or (batch, pos), got {tuple(given.shape)}")
    return given


def dummy_distance(model: Any, distance: int | float, *, layers: Layers = None, heads: Heads = None) -> Hooks:
    """Set the distance between every query and key to one number.

    A head's scores then depend on content alone, at that distance: ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i θ_c d))``
    (arXiv 2503.13305). A negative distance puts every key after its query. The formula is exact there, too, but no
    causal model was trained at such a distance, hence a warning.

    Args:
        model, layers, heads: as in ``swap_positions``.
        distance: query position minus key position, in positions; any finite real number, from 0 on for causal layers.

    Raises:
        ValueError: a distance that is not a finite number, or what ``swap_positions`` refuses.

    Warns:
        UserWarning: a negative distance in a causal layer.

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> near, far = (model.run_with_hooks(tokens, fwd_hooks=dummy_distance(model, d)) for d in (5, 50))
        >>> bool((near - far).abs().max() > 1), dummy_distance(model, 5)
        (True, dummy_distance(5) on 5 layers × 8 heads)
    """
    check_number("distance", distance)
    chosen = any_heads(model, layers, heads, "dummy_distance")
    hooks = hooks_for(chosen, f"dummy_distance({distance:g})", distances=float(distance))
    if distance < 0:
        _warn_of_future(hooks, f"distance: must be 0 or more for keys before their query, got {distance:g}")
    return hooks


def _warn_of_future(hooks: Hooks, problem: str) -> None:
    """Warn that distances are negative, if a layer is causal."""
    if causal := [layer for layer, spec in hooks.specs.items() if spec.causal]:
        warnings.warn(
            f"{problem}. In {plural(len(causal), 'causal layer')} keys are then in the future, at distances at which "
            "the model was not trained: give the distance with the other sign, or filter this warning if that is meant",
            stacklevel=3,
        )


def remap_distance(
    model: Any,
    distances: Callable[[Tensor], Tensor] | Tensor,
    *,
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Replace distances by a function of the real distance, or by a matrix.

    The score of query i and key j becomes ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i θ_c D[i, j]))`` plus the part that
    RoPE does not rotate; the mask does not change. A piecewise linear function with few pieces (a ceiling, halving) is
    fast; anything else is computed subspace by subspace, in blocks of bounded memory.

    Args:
        distances: an elementwise function from a float64 tensor of real distances (query position minus key position)
            to one of the same shape; or a matrix ``[query, key]``, ``[head, query, key]`` or ``[batch, head or 1,
            query, key]`` of finite numbers, of which only the cells inside the mask count.
        model, layers, heads: as in ``swap_positions``.

    Warns:
        UserWarning: negative values where a key is not after its query, in a causal layer.

    Raises:
        ValueError: neither a function nor a tensor of 2 to 4 axes; values that are not finite; or what
            ``swap_positions`` refuses. While running: a matrix that does not fit the text.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model, remap_distance
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> for most in (16, 48):  # no distance in the text exceeds 48
        ...     hooks = remap_distance(model, lambda d: d.clamp(max=most))
        ...     print(torch.allclose(model.run_with_hooks(tokens, fwd_hooks=hooks), model(tokens), atol=1e-3))
        False
        True
    """
    future = False
    if isinstance(distances, Tensor):
        distances = real_tensor("distances", distances, finite=False)
        described = f"{'×'.join(map(str, distances.shape))} distances"
        if distances.ndim not in (2, 3, 4) or distances.numel() == 0:
            raise ArgumentError(
                "distances",
                "must have shape (query, key), (head, query, key) or (batch, head, query, key), "
                f"got {tuple(distances.shape)}",
            )
        future = distances.shape[-1] == distances.shape[-2] and bool((distances.tril() < 0).any())
    elif callable(distances):
        described = getattr(distances, "__name__", "a function")
        real = torch.arange(64.0, dtype=torch.float64)
        future = bool((mapped(distances, real, "distances", "real distances") < 0).any())  # or fail, before any pass
    else:
        raise ArgumentError("distances", f"must be a function or a tensor, got {type(distances).__name__}")
    chosen = any_heads(model, layers, heads, "remap_distance")
    hooks = hooks_for(chosen, f"remap_distance({described})", distances=distances)
    if future:
        _warn_of_future(hooks, f"distances: must be 0 or more for keys before their query, got less by {described}")
    return hooks


def position_interpolation(model: Any, factor: int | float, *, layers: Layers = None, heads: Heads = None) -> Hooks:
    """Divide all positions by ``factor`` (position interpolation).

    If ``factor`` is the ratio of text length to training length, distances stay in the trained range (arXiv
    2306.15595).

    Args:
        model, layers, heads: as in ``swap_positions``. For texts beyond the context load it with a larger ``n_ctx``.
        factor: a positive finite number; values below 1 spread positions out.

    Raises:
        ValueError: a factor that is not a positive finite number, or what ``swap_positions`` refuses.

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
    chosen = any_heads(model, layers, heads, "position_interpolation")
    return hooks_for(chosen, f"position_interpolation({factor:g})", factor=float(factor))
