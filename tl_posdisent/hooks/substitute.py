"""Replace the scores of heads by additive fits, or their attention by additive attention of increasing freedom."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.attention.rungs import RUNGS, Rung, rung_logits
from tl_posdisent.hooks.edit import NewScores, View
from tl_posdisent.hooks.hook_list import Chosen, Heads, Hooks, any_heads, hooks_for
from tl_posdisent.hooks.score_components import ScorePart, fewest_masks, keep_parts_of, keep_two_axis
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


def substitute_attention(
    model: Any,
    by: Rung,
    *,
    layers: Layers = None,
    heads: Heads = None,
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
    * ``"untouched"``: the scores as they are, bit for bit.

    ``attention_ladder`` also applies the lower rungs, up to static heads, to texts that they were not fitted to.

    A learned sink (GPT-OSS) is fitted like a key: summed over queries, it keeps its attention, and its share no longer
    depends on the query. Distances are those of the tokens, also under position interventions.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        by: name of the rung.
        layers, heads: query heads of layers, default all.

    Returns:
        ``Hooks``, which add to interventions on the rotation (except for ``"uniform"`` and ``"first_token"``) and to
        hidden keys, but not to other edits of a head's scores.

    Raises:
        ValueError: an unknown rung; what ``drop_component`` refuses.

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
    return rung_hooks(any_heads(model, layers, heads), by)


def rung_hooks(chosen: Chosen, rung: Rung) -> Hooks:
    """Return hooks that fit a rung to the running attention of these heads."""
    of_nothing = rung in ("uniform", "first_token")
    new = NewScores(partial(_rung, rung=rung), vectors=rung == "static", replaces=of_nothing)
    return hooks_for(chosen, f"substitute_attention({rung})", scores=new)


def _rung(view: View, rung: Rung) -> Tensor:
    scores, inside = view.scores, fewest_masks(view.inside)
    if rung == "untouched":
        return scores
    keys = view.vectors[1] if rung == "static" else None
    logits = rung_logits(rung, scores, inside, keys)
    if view.spec.sinks is None:
        return logits
    return logits + sink_level(view.spec.sinks[list(view.heads)], scores, logits, view.inside)


_HALVINGS = 60
_FARTHEST = 50.0  # nats: a sink's share is then 0 or 1 up to rounding


@torch.no_grad()
def sink_level(
    sinks: Float[Tensor, " head"],
    scores: Float[Tensor, "text head query key"],
    logits: Float[Tensor, "text head query key"],
    inside: Bool[Tensor, "*lead query key"],
    *,
    pool: bool = False,
) -> Float64[Tensor, "text_or_one head 1 1"]:
    """Find the constant of each head by which logits are raised so that its learned sink keeps its total attention.

    A sink competes with all keys of a query, but for a softmax of logits their level is arbitrary. With this one the
    sink is a key of attention that does not depend on the query: summed over queries (and ``pool``, texts) its share is
    that under the scores, which is where the divergence from the data is least.

    Args:
        sinks: logits of the sinks of these heads.
        scores: the head's own.
        logits: what replaces them.
        inside: where a query sees a key.
    """
    seen = inside.any(-1).expand(scores.shape[:-1])
    own, new = (x.double().masked_fill(~inside, -torch.inf).logsumexp(-1) for x in (scores, logits))
    excess, axes = sinks.double()[:, None] - new, (0, 2) if pool else (2,)
    target = torch.where(seen, torch.sigmoid(sinks.double()[:, None] - own), 0.0).sum(axes, keepdim=True)
    low = torch.where(seen, excess, torch.inf).amin(axes, keepdim=True) - _FARTHEST
    high = torch.where(seen, excess, -torch.inf).amax(axes, keepdim=True) + _FARTHEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = torch.where(seen, torch.sigmoid(excess - middle), 0.0).sum(axes, keepdim=True) > target
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return ((low + high) / 2)[..., None]
