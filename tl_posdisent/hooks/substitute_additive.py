"""Replace the scores of heads by additive fits."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor

from tl_posdisent.hooks.edit import NewScores, View
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for
from tl_posdisent.hooks.score_components import ScorePart, keep_parts_of, keep_two_axis
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.utils.validation import check_choice, check_subset

Axes = Literal["three", "two"]

PARTS: tuple[ScorePart, ...] = get_args(ScorePart)
ADDITIVE: tuple[ScorePart, ...] = ("distance", "query", "key")
_TWO_AXES = "substitute_additive with two axes"


def substitute_additive(
    model: Any,
    keep: Collection[ScorePart] = ADDITIVE,
    *,
    axes: Axes = "three",
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Replace the scores of heads by their additive fit, computed in every forward pass.

    With ``axes="three"`` the scores of each text and head become ``mean + distance[i - j] + query[i] + key[j]``, fitted
    to the scores by least squares (``fit_additive``). With ``"two"`` they become a function of query and distance plus
    a function of query and key, computed from the table ``W[d, i, j]``: the score of each query of the text with each
    of its keys (also later ones) at each distance that the layer's mask allows. A dot denotes a mean::

        distance = W[i - j, i, ·] - W[·, i, ·]       of this query and the distance
        key      = W[·, i, j]     - W[·, i, ·]       of this query and the key
        query    = W[·, i, ·]     - W[·, ·, ·]
        residual = W[i - j, i, j] - W[i - j, i, ·] - W[·, i, j] + W[·, i, ·]

    The two-axis fit needs rotary embeddings and is computed before a soft cap. The overall mean is always kept.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model.
        keep: parts to keep, among ``"distance"``, ``"query"``, ``"key"``, ``"residual"``; ``()`` leaves uniform
            attention. All four leave the scores as they are, bit for bit.
        axes: the additive model, ``"three"`` or ``"two"``.
        layers, heads: query heads of layers, default all (for two axes, all with RoPE).

    Raises:
        ValueError: an unknown or repeated part; unknown axes; a layer without rotary embeddings for two axes; what
            ``drop_component`` refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.hooks import substitute_additive
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> def loss(hooks):
        ...     return model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).item()
        >>> loss([]) < loss(substitute_additive(model)) < loss(substitute_additive(model, keep=()))
        True
    """
    kept = check_subset("keep", keep, PARTS)
    check_choice("axes", axes, get_args(Axes))
    if axes == "three":
        chosen = any_heads(model, layers, heads)
    else:
        chosen = any_heads(model, layers, heads, _TWO_AXES)
        for spec, _ in chosen:
            spec.require_scale()
    if axes == "two" and len(kept) < len(PARTS):
        new = NewScores(partial(_two_axes, keep=tuple(kept)), vectors=True, replaces=True)
        return hooks_for(chosen, _TWO_AXES, scores=new)
    return hooks_for(chosen, f"substitute_additive({', '.join(kept)})", scores=keep_parts_of(kept))


def _two_axes(view: View, keep: Collection[ScorePart]) -> Tensor:
    q, k = view.vectors
    return keep_two_axis(view.spec, q, k, view.inside, keep)
