"""Replace the scores of heads by additive fits, or their attention by additive attention of increasing freedom."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.additive.attention.result import AttentionFit
from tl_posdisent.additive.attention.rungs import (
    PER_HEAD,
    RUNGS,
    Rung,
    check_rung_options,
    fit_rung,
    rung_logits,
    seen_keys,
)
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.edits.score_edits import Order, ScoreEdit, View
from tl_posdisent.hooks.hook_list import Chosen, Heads, Hooks, Layers, any_heads, hooks_for, joined
from tl_posdisent.hooks.score_components import Part, component_edit, fewest_masks, keep_two_axis, keys_there
from tl_posdisent.models.reading.forward_pass import running
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice

Axes = Literal["three", "two"]

PARTS: tuple[Part, ...] = get_args(Part)
ADDITIVE: tuple[Part, ...] = ("distance", "query", "key")
BANDS = (1, 2, 4, 8)
"""The distances {0}, {1}, {2, 3}, {4 … 7} and {8 …}."""


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
        raise ArgumentError("keep", f"must be some of {', '.join(PARTS)}, each once, got {keep!r}")
    chosen = additive_heads(model, axes, layers, heads, "substitute_additive")
    return joined(keep_parts_hooks(spec, some, kept, axes) for spec, some in chosen)


def keep_parts_hooks(spec: AttentionSpec, heads: Sequence[int], keep: Collection[Part], axes: Axes) -> Hooks:
    """Return hooks that keep these parts of the additive fit of the running scores."""
    if axes == "three" or len(keep) == len(PARTS):
        return hooks_for([(spec, heads)], component_edit(f"substitute_additive({', '.join(keep)})", keep))

    edit = partial(_two_axes, keep=tuple(keep))
    tool = "substitute_additive with two axes"
    return hooks_for([(spec, heads)], ScoreEdit(tool, edit, Order.REPLACE, vectors=True, plain=True))


def _two_axes(view: View, keep: Collection[Part]) -> Tensor:
    rotary = view.spec.require_rotary("two axes")
    q, k = view.vectors
    _check_consecutive(view)
    other = replace(view.spec, rotary=view.rotation.frequencies(rotary))
    return keep_two_axis(other, view.rotation.kept(q, rotary), k, view.inside, keep)


def _check_consecutive(view: View) -> None:
    """Refuse user-supplied positions with gaps: the table holds the distances of a text without gaps."""
    own, there = view.own[0], keys_there(view.inside)
    steps = (own - torch.arange(own.shape[-1], device=own.device)).expand(there.shape)
    first = steps.masked_fill(~there, torch.iinfo(steps.dtype).max).amin(-1, keepdim=True)
    if bool(((steps != first) & there).any()):
        raise ArgumentError(
            "axes",
            "must be 'three' for a text whose positions are not consecutive (position_ids, an attention mask with "
            f"a gap), as in layer {view.spec.layer}",
        )


def additive_heads(model: Any, axes: Axes, layers: Layers, heads: Heads, tool: str) -> Chosen:
    """Choose the layers and heads that the additive model with these axes can fit."""
    check_choice("axes", axes, get_args(Axes))
    two = axes == "two"
    chosen = any_heads(model, layers, heads, f"{tool} with two axes" if two else None)
    for spec, _ in chosen:
        if two:
            spec.require_scale()
    return chosen


def substitute_attention(
    model: Any,
    by: Rung,
    *,
    layers: Layers = None,
    heads: Heads = None,
    bands: Sequence[int] = BANDS,
    rank: int = 1,
) -> Hooks:
    """Replace the attention of heads by the best additive attention of a given freedom.

    ``by`` names a rung. In every forward pass, each head's pattern is fitted by minimum Kullback-Leibler divergence
    (``fit_attention``), separately for each text. The pattern that is fitted is ``0.999 * pattern + 0.001 * uniform``:
    with that pseudo-count of uniform attention, coefficients stay finite where a key or a distance gets no attention.

    * ``"uniform"``: equal weight on all keys; ``"first_token"``: all weight on the first token, or uniform where a
      window hides it;
    * ``"distance"``: ``softmax(d[i - j])``; ``"distance+sink"``: adds a term for the first token;
    * ``"static"``: adds ``u · k_j``, linear in the head's key vectors before rotation;
    * ``"additive"``: ``softmax(d[i - j] + k[j])``, with a free importance for each key;
    * ``"banded"``: separate importances in each band of distances;
    * ``"low-rank"``: adds ``u_i · v_j`` of a small rank to the banded fit, which is kept fixed (a local optimum: 100
      steps of L-BFGS from the leading singular vectors);
    * ``"untouched"``: the scores as they are, bit for bit.

    ``attention_ladder`` also applies the lower rungs, up to static heads, to texts that they were not fitted to.

    The sum of each query's exponentials is preserved, and distances are those of the tokens, also under position
    interventions.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        by: name of the rung.
        layers, heads: query heads of layers, default all.
        bands: for ``"banded"`` and ``"low-rank"``: distances at which a new band begins.
        rank: for ``"low-rank"``: rank of the added term.

    Returns:
        ``Hooks``, which compose with interventions on the rotation (except for ``"uniform"`` and ``"first_token"``),
        but not with others that replace or patch a head's scores, nor ``"first_token"`` with those that fit them.

    Raises:
        ValueError: an unknown rung; invalid bands or rank; what ``drop_component`` refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.hooks import substitute_attention
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> def loss(hooks):
        ...     return model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).item()
        >>> uniform, additive = (loss(substitute_attention(model, rung)) for rung in ("uniform", "additive"))
        >>> loss([]) < additive < uniform
        True
    """
    check_choice("by", by, RUNGS)
    check_rung_options(bands, rank)
    chosen = any_heads(model, layers, heads)
    return rung_hooks(chosen, by, bands, rank)


def rung_hooks(chosen: Chosen, rung: Rung, bands: Sequence[int], rank: int) -> Hooks:
    """Return hooks that fit a rung to the running attention of these heads."""
    edit = partial(_rung, rung=rung, bands=tuple(bands), rank=rank)
    more: dict[str, Any] = {"scores": True, "vectors": rung == "static"}
    more["hides"] = rung == "first_token"
    more["plain"] = rung in ("uniform", "first_token")
    return hooks_for(chosen, ScoreEdit(f"substitute_attention({rung})", edit, Order.REPLACE, **more))


def _rung(view: View, rung: Rung, bands: Sequence[int], rank: int) -> Tensor:
    scores, inside = view.scores, fewest_masks(view.inside)
    if rung == "untouched":
        return scores
    keys = view.vectors[1] if rung == "static" else None
    return _with_sums_of(scores, rung_logits(rung, scores, inside, keys, bands=bands, rank=rank), view.inside)


def _with_sums_of(scores: Tensor, logits: Tensor, inside: Tensor) -> Tensor:
    """Shift each query's logits by a constant so that the sum of their exponentials equals that of the scores."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    before, after = (x.masked_fill(~inside, -torch.inf).logsumexp(-1, keepdim=True) for x in (wide, logits))
    return torch.where(inside, logits + (before - after), 0.0)


def _put_in_hooks(chosen: Chosen, edit: Callable[[View], Tensor], *, of_keys: bool) -> Hooks:
    call = "substitute_attention(fits)"
    return hooks_for(chosen, ScoreEdit(call, edit, Order.REPLACE, scores=True, vectors=of_keys, plain=True))


@dataclass(frozen=True, eq=False)
class StoredAttention:
    """Attention fitted earlier, for some heads of a layer: static heads, or logits of given texts."""

    of: AttentionFit | Float[Tensor, "text head query key"]
    heads: tuple[int, ...]
    of_keys: bool = False  # whether it depends on key vectors

    def put_in(self, view: View) -> Tensor:
        """Return what replaces the running scores of some of the heads."""
        scores, at = view.scores, [self.heads.index(head) for head in view.heads]
        if isinstance(self.of, Tensor):
            return _with_sums_of(scores, self.of[:, at], view.inside)
        inside = fewest_masks(view.inside)
        keys = view.vectors[1] if self.of_keys else scores.new_zeros(len(scores), scores.shape[-1], 1, 0)
        return _with_sums_of(scores, self.of.static_scores(seen_keys(keys, inside), mask=inside, heads=at), view.inside)


def stored_hooks(chosen: Chosen, stored: Mapping[int, StoredAttention]) -> Hooks:
    of_keys = any(stored[spec.layer].of_keys for spec, _ in chosen)
    return _put_in_hooks(chosen, lambda view: stored[view.spec.layer].put_in(view), of_keys=of_keys)


Stored = dict[int, StoredAttention]
"""The stored attention of each layer."""

_OfLayer = tuple[Tensor, Tensor | None]
Attended = dict[int, _OfLayer]
"""Scores and keys of each layer in texts of equal length."""


def fit_in_turn(
    model: Any,
    texts: Sequence[Int[Tensor, "text pos"]],
    chosen: Chosen,
    rung: Rung,
    *,
    seen: Sequence[Attended] = (),
    bands: Sequence[int] = BANDS,
    rank: int = 1,
) -> Stored:
    """Fit a rung to what was ``seen``, or layer by layer, each in a run with the fits of earlier layers put in.

    Returns one fit of the chosen heads to all texts (in groups of equal length), or, for rungs with free importances,
    the logits of each text of a single group.
    """
    stored: Stored = {}
    options: dict[str, Any] = {"rung": rung, "bands": bands, "rank": rank}
    in_turn, of_keys = not any(seen), rung == "static"
    if in_turn and len(texts) == 1:  # in one pass each layer's fit takes effect at once
        edit = partial(_fit_and_put_in, stored=stored, **options)
        _run_under(model, texts[0], joined([]), chosen, edit, of_keys=of_keys)
        return stored
    for spec, heads in chosen:
        hooks, one = stored_hooks([each for each in chosen if each[0].layer in stored], stored), [(spec, heads)]
        found = [attended(model, tokens, one, hooks, with_keys=of_keys) for tokens in texts] if in_turn else seen
        stored[spec.layer] = _fit(spec, heads, [each[spec.layer] for each in found], **options)
    return stored


def _fit_and_put_in(view: View, stored: Stored, **options: Any) -> Tensor:
    keys = view.vectors and view.vectors[1]
    fit = stored[view.spec.layer] = _fit(view.spec, view.heads, [(view.scores, keys)], **options)
    return fit.put_in(view)


def _fit(
    spec: AttentionSpec, heads: Sequence[int], of_texts: Sequence[_OfLayer], rung: Rung, bands: Sequence[int], rank: int
) -> StoredAttention:
    """Fit a rung to these heads, given their scores and keys."""
    scores, keys, inside = _side_by_side(spec, of_texts)
    if rung in PER_HEAD:
        fit = fit_rung(rung, scores, inside, keys, bands=(), pool=True)
        return StoredAttention(fit, tuple(heads), of_keys=rung == "static")
    return StoredAttention(rung_logits(rung, scores, inside, None, bands=bands, rank=rank).float(), tuple(heads))


def attended(model: Any, tokens: Int[Tensor, "text pos"], chosen: Chosen, hooks: Hooks, *, with_keys: bool) -> Attended:
    """Return the scores (and keys) of these heads in a run with hooks on others."""
    found: Attended = {}

    def keep(view: View) -> Tensor:
        found[view.spec.layer] = view.scores, view.vectors and view.vectors[1]
        return view.scores

    _run_under(model, tokens, hooks, chosen, keep, of_keys=with_keys)
    return found


def _run_under(model: Any, tokens: Tensor, hooks: Hooks, chosen: Chosen, edit: Any, *, of_keys: bool) -> None:
    with applied(model, hooks + _put_in_hooks(chosen, edit, of_keys=of_keys)), running(model) as p:
        p.run(tokens, stop=max(spec.layer for spec, _ in chosen) + 1)


def _side_by_side(
    spec: AttentionSpec, of_texts: Sequence[_OfLayer]
) -> tuple[Tensor, Tensor | None, Bool[Tensor, "*mask query key"]]:
    """Pad scores and keys of texts of unequal lengths, all starting at 0, into one batch; return them and its mask."""
    longest = max(scores.shape[-1] for scores, _ in of_texts)
    mask = spec.mask(longest, of_texts[0][0].device)
    if len(of_texts) == 1:
        return *of_texts[0], mask
    scores, masks = [], []
    for each, _ in of_texts:
        room = longest - each.shape[-1]
        scores.append(torch.nn.functional.pad(each, (0, room, 0, room)))
        inside = torch.arange(longest, device=mask.device) < each.shape[-1]
        masks.append((mask & inside & inside[:, None]).expand(len(each), 1, -1, -1))
    keys = [torch.nn.functional.pad(k, (0, 0, 0, 0, 0, longest - k.shape[1])) for _, k in of_texts if k is not None]
    return torch.cat(scores), torch.cat(keys) if keys else None, torch.cat(masks)
