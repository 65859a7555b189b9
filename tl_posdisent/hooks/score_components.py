"""Additive components of a head's scores, computed within the forward pass: distance, query, key and residual.

A part is a component of the three-axis fit of the pass's own scores (``additive/fit.py``), for each text and head. The
mean score is a separate part, which no function here removes: a softmax cancels it, except beside an attention sink.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Complex, Float, Float64
from torch import Tensor

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.additive.result import Component
from tl_posdisent.hooks.edit import NewScores, View
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import Rotary, from_complex, rotate, to_complex
from tl_posdisent.utils.validation import check_choice

ScorePart = Literal["distance", "query", "key", "residual"]
_FITTED: tuple[Component, ...] = get_args(Component)


def split_scores(
    scores: Float[Tensor, "batch head query key"], inside: Bool[Tensor, "*lead query key"]
) -> dict[str, Float64[Tensor, "batch head query key"]]:
    """Split scores into a sum of ``"mean"``, ``"distance"``, ``"query"``, ``"key"`` and ``"residual"``.

    Scores and mask are those of a ``View``; the parts are 0 outside the mask. Gradients flow through the residual
    alone: the fit counts as constant.

    Raises:
        ValueError: a text without any cell inside the mask; scores inside it that are not finite.
    """
    fit = fit_additive(scores, mask=fewest_masks(inside))
    mean = torch.where(inside, fit.intercept[..., None, None], 0.0)
    fitted: dict[str, Tensor] = {name: fit.component(name) for name in _FITTED}
    residual = torch.where(inside, scores.double() - mean - sum(fitted.values()), 0.0)
    return {"mean": mean, **fitted, "residual": residual}


def keep_parts(
    scores: Float[Tensor, "batch head query key"], inside: Bool[Tensor, "*lead query key"], keep: Collection[ScorePart]
) -> Float[Tensor, "batch head query key"]:
    """Sum the mean and these parts of the scores, as in ``split_scores``; values outside the mask are arbitrary.

    Only these parts are allocated; if all are kept, the result is the scores themselves, bit for bit.
    """
    if len(keep) == len(get_args(ScorePart)):
        return scores
    fit = fit_additive(scores, mask=fewest_masks(inside))
    if "residual" in keep:
        return sum((-fit.component(name) for name in _FITTED if name not in keep), scores.double())
    if len(keep) == len(_FITTED):
        return fit.fitted()
    mean = fit.intercept[..., None, None].expand(scores.shape)
    return sum((fit.component(name) for name in _FITTED if name in keep), mean)


def fewest_masks(inside: Tensor) -> Tensor:
    """Reduce equal masks to one: heads share theirs, and without padding so do texts."""
    for axis in reversed(range(inside.ndim - 2)):
        first = inside.narrow(axis, 0, 1)
        if inside.shape[axis] > 1 and (inside.stride(axis) == 0 or bool((inside == first).all())):
            inside = first
    return inside


def drop_component(model: Any, component: ScorePart, *, layers: Layers = None, heads: Heads = None) -> Hooks:
    """Remove one additive component from the scores of heads.

    In each forward pass the scores of each text and head, after a soft cap, are fitted by
    ``mean + distance[i - j] + query[i] + key[j]`` (the three-axis model of arXiv 2503.13305, in the gauge of
    ``AdditiveFit``), and one component, or the residual, is subtracted. Gradients treat the fit as constant. A softmax
    ignores ``"query"``, except beside an attention sink (GPT-OSS).

    Args:
        model: HookedTransformer, TransformerBridge or a similar model.
        component: ``"distance"``, ``"query"``, ``"key"`` or ``"residual"``.
        layers, heads: query heads of layers, default all.

    Raises:
        ValueError: an unknown component; layers or heads out of range or repeated; a layer whose scores cannot be
            changed. While running: a KV cache, a text that is all padding, scores that are not finite.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.hooks import drop_component
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> loss = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=drop_component(model, "distance"))
        >>> bool(loss > model(tokens, return_type="loss") + 0.01)
        True
    """
    check_choice("component", component, get_args(ScorePart))
    others = [name for name in get_args(ScorePart) if name != component]
    return hooks_for(any_heads(model, layers, heads), f"drop_component({component})", scores=keep_parts_of(others))


def keep_parts_of(keep: Collection[ScorePart]) -> NewScores:
    """Return the edit that keeps these parts of the three-axis fit of the scores, and their mean."""
    return NewScores(partial(_kept, keep=tuple(keep)))


def _kept(view: View, keep: Collection[ScorePart]) -> Tensor:
    return keep_parts(view.scores, view.inside, keep)


# The two-axis model (``substitute_additive``). Means of the table over keys and over distances are the scores of a mean
# key and of a mean rotation, so the table is never made (arXiv 2503.13305, §3).


class TwoAxisParts(NamedTuple):
    """Parts of scores before a soft cap. They broadcast to ``[batch, head, query, key]``; their sum is the scores less
    the residual. All but ``mean`` have mean 0 over the table."""

    mean: Float[Tensor, "batch head 1 1"]
    distance: Float[Tensor, "batch head query key"]
    query: Float[Tensor, "batch head query 1"]
    key: Float[Tensor, "batch head query key"]


def keep_two_axis(
    spec: AttentionSpec,
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos head d_head"],
    inside: Bool[Tensor, "*lead query key"],
    keep: Collection[ScorePart],
) -> Float[Tensor, "batch head query key"]:
    """Compute scores of a ``View``'s vectors from the mean and these parts alone, soft cap applied, mask not.

    Computed in float32 (float64 for float64). Keys that no query sees (padding) are not in the table.
    """
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    parts = split_two_axis(spec, q, k, inside)
    named = {"distance": parts.distance, "query": parts.query, "key": parts.key}
    if "residual" not in keep:
        out = sum((part for name, part in named.items() if name in keep), parts.mean)
        return spec.capped(out.expand_as(parts.distance))
    positions = torch.arange(q.shape[1], device=q.device)
    own = _dot(spec, spec.rotated(q, positions), spec.rotated(k, positions))
    return spec.capped(sum((-part for name, part in named.items() if name not in keep), own))


def split_two_axis(spec: AttentionSpec, q: Tensor, k: Tensor, inside: Tensor) -> TwoAxisParts:
    """Compute the parts of the two-axis model at the real distances, in closed form."""
    rotary, positions = spec.require_rotary("two axes"), torch.arange(q.shape[1], device=q.device)
    there = keys_there(inside)  # and the queries that are not padding
    weights = there.to(q.dtype) / there.sum(-1, keepdim=True)
    mean_key = torch.einsum("bkhd,bk->bhd", k, weights.expand(len(k), -1))[:, None]
    turn = _mean_turn(spec, rotary, there)
    alone = torch.einsum("bqhd,bhd->bhq", q, _turned(mean_key, turn, rotary)[:, 0]) * spec.require_scale()
    distance = _dot(spec, rotate(q, positions, rotary), rotate(mean_key.expand_as(k), positions, rotary))
    key = _dot(spec, q, _turned(k, turn, rotary))
    mean = (alone * weights[:, None]).sum(-1)
    at_query = alone[..., None]
    return TwoAxisParts(mean[..., None, None], distance - at_query, at_query - mean[..., None, None], key - at_query)


def _dot(spec: AttentionSpec, q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", q, k) * spec.require_scale()


def keys_there(inside: Tensor) -> Bool[Tensor, "one_or_batch key"]:
    """Find the keys that some query of some head sees."""
    seen = inside.any(-2)
    return seen.any(1) if inside.ndim == 4 else seen[None]


def _mean_turn(spec: AttentionSpec, rotary: Rotary, there: Tensor) -> Complex[Tensor, "one_or_batch subspace"]:
    """Average ``exp(i θ d)`` over the distances that the layer's mask allows in each text, with equal weights."""
    longest = there.shape[-1]
    distances = torch.arange(1 - longest, longest, device=there.device)
    counts = spec.sees(distances) & (distances.abs() < there.sum(-1, keepdim=True))
    angle = rotary.angles(distances)
    turns = torch.polar(torch.ones_like(angle), angle)
    return counts.to(turns.dtype) @ turns / counts.sum(-1, keepdim=True)


def _turned(k: Tensor, turn: Tensor, rotary: Rotary) -> Tensor:
    """Turn keys so that their products with unrotated queries are the scores at the mean rotation."""
    z, rest = to_complex(k, rotary)
    return from_complex(z * (rotary.attention_factor**2 * turn.conj()).to(z.dtype)[:, None, None], rest, rotary)
