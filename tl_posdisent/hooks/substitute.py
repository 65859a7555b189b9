"""Substitute the additive fit of attention scores for the scores themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tl_posdisent.hooks.edits.scores import Order, ScoreEdit, View
from tl_posdisent.hooks.hook_list import Chosen, Heads, Hooks, Layers, any_heads, joined, layer_hooks, rotary_heads
from tl_posdisent.hooks.score_components import Part, component_edit, keep_two_axis, keys_there
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.validation import check_choice

Axes = Literal["three", "two"]

PARTS: tuple[Part, ...] = get_args(Part)
ADDITIVE: tuple[Part, ...] = ("distance", "query", "key")


def substitute_additive(
    model: Any,
    keep: Collection[Part] = ADDITIVE,
    *,
    axes: Axes = "three",
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Replace the scores of heads by their additive fit, computed in every forward pass.

    With ``axes="three"`` the scores of each text and head become ``mean + distance[i - j] + query[i] + key[j]``, fitted
    by least squares to the scores (``fit_additive``). With ``"two"`` they become a function of query and distance plus
    a function of query and key. The scores of one text do not determine these, so they are those of the table
    ``W[d, i, j]``, in which each query of the text meets each of its keys (also later ones) at each distance that the
    layer's mask allows, all with equal weight. With a dot for a mean::

        distance = W[i - j, i, ·] - W[·, i, ·]       of this query and the distance
        key      = W[·, i, j]     - W[·, i, ·]       of this query and the key
        query    = W[·, i, ·]     - W[·, ·, ·]
        residual = W[i - j, i, j] - W[i - j, i, ·] - W[·, i, j] + W[·, i, ·]

    by a mean key and a mean rotation. This needs rotary embeddings, and is done before a soft cap. The mean of all
    stays in any case.

    Args:
        model: HookedTransformer, TransformerBridge or alike.
        keep: parts to keep, among ``"distance"``, ``"query"``, ``"key"``, ``"residual"``; ``()`` leaves uniform
            attention. All four leave the scores as they are, to the last bit.
        axes: the additive model, ``"three"`` or ``"two"``.
        layers, heads: query heads of layers, default all (all that rotate, for two axes).

    Raises:
        ValueError: an unknown or repeated part; unknown axes; a layer without rotary embeddings for two axes; what
            ``drop_component`` refuses. While running, for two axes: positions that are not consecutive.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.hooks import substitute_additive
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> def loss(hooks):
        ...     return model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).item()
        >>> loss([]) < loss(substitute_additive(model)) < loss(substitute_additive(model, keep=()))
        True
    """
    kept = None if isinstance(keep, (str, bytes)) or not isinstance(keep, Iterable) else tuple(keep)
    if kept is None or any(name not in PARTS for name in kept) or len(set(kept)) < len(kept):
        raise ValueError(f"keep must be some of {', '.join(PARTS)}, each once, got {keep!r}")
    chosen = additive_heads(model, axes, layers, heads, "substitute_additive")
    return joined(keep_parts_hooks(spec, some, kept, axes) for spec, some in chosen)


def keep_parts_hooks(spec: AttentionSpec, heads: Sequence[int], keep: Collection[Part], axes: Axes) -> Hooks:
    """The parts of the fit of the scores that are there."""
    if axes == "three" or len(keep) == len(PARTS):
        return layer_hooks(spec, heads, component_edit(f"substitute_additive({', '.join(keep)})", keep))

    def fit(view: View) -> Tensor:
        rotary = view.spec.require_rotary("two axes")
        q, k = view.vectors()
        _check_consecutive(view)
        other = replace(view.spec, rotary=view.rotation.frequencies(rotary))
        return keep_two_axis(other, view.rotation.kept(q, rotary), k, view.inside, keep)

    tool = "substitute_additive with two axes"
    return layer_hooks(spec, heads, ScoreEdit(tool, fit, Order.REPLACE, vectors=True, plain=True))


def _check_consecutive(view: View) -> None:
    """Refuse positions of the user's own: the table has the distances of a text without gaps."""
    own, there = view.own[0], keys_there(view.inside)
    steps = (own - torch.arange(own.shape[-1], device=own.device)).expand(there.shape)
    first = steps.masked_fill(~there, torch.iinfo(steps.dtype).max).amin(-1, keepdim=True)
    if bool(((steps != first) & there).any()):
        raise ValueError(
            "axes must be 'three' for a text whose positions are not consecutive (position_ids, an attention mask with "
            f"a gap), as in layer {view.spec.layer}"
        )


def additive_heads(model: Any, axes: Axes, layers: Layers, heads: Heads, tool: str) -> Chosen:
    """Layers that can be fitted by so many axes, with their heads."""
    check_choice("axes", axes, get_args(Axes))
    if axes == "three":
        return any_heads(model, layers, heads)
    chosen = rotary_heads(model, layers, heads, f"{tool} with two axes")
    for spec, _ in chosen:
        spec.require_scale()
    return chosen


def additive_specs(model: Any, axes: Axes, layers: Layers, tool: str) -> list[AttentionSpec]:
    """Layers that can be fitted by so many axes."""
    return [spec for spec, _ in additive_heads(model, axes, layers, None, tool)]
