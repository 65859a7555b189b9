"""Replace the attention of heads by additive attention, fitted to the running text or to given texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tl_posdisent.additive.attention.result import AttentionFit
from tl_posdisent.additive.attention.rungs import PER_HEAD, RUNGS, Rung, fit_rung, rung_logits, seen_keys
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.edit import NewScores, View
from tl_posdisent.hooks.hook_list import Chosen, Heads, Hooks, any_heads, hooks_for, joined
from tl_posdisent.hooks.score_components import fewest_masks
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.utils.errors import naming
from tl_posdisent.utils.validation import check_choice, listed
from tl_posdisent.utils.words import plural

_BYTES_OF_SCORES = 2**28  # of several layers, that are kept for a fit
FittedRung = Literal["distance", "distance+sink", "static"]


def substitute_attention(
    model: Any,
    by: Rung,
    *,
    fitted_to: Tokens | None = None,
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Replace the attention of heads by the best additive attention of a given freedom.

    ``by`` names a rung. Each head's pattern is fitted by minimum Kullback-Leibler divergence (``fit_attention``): in
    every forward pass, separately for each text; or, with ``fitted_to``, once, to these texts in the unmodified model,
    and the result replaces the attention in other texts. The pattern that is fitted is ``0.999 * pattern +
    0.001 * uniform``: with that pseudo-count of uniform attention, coefficients stay finite where a key or a distance
    gets no attention.

    * ``"uniform"``: equal weight on all keys; ``"first_token"``: all weight on the first token, or uniform where a
      window hides it;
    * ``"distance"``: ``softmax(d[i - j])``; ``"distance+sink"``: adds a term for the first token;
    * ``"static"``: adds ``u · k_j``, linear in the head's key vectors before rotation;
    * ``"additive"``: ``softmax(d[i - j] + k[j])``, with a free importance for each key;
    * ``"untouched"``: the scores as they are, bit for bit.

    A learned sink (GPT-OSS) is fitted like a key: summed over queries, it keeps its attention, and its share no longer
    depends on the query. Distances are those of the tokens, also under position interventions.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        by: name of the rung; with ``fitted_to``, ``"distance"``, ``"distance+sink"`` or ``"static"``.
        fitted_to: texts, as in ``head_ablation``, no shorter than those that are run; for ``"static"``, at least four
            keys per coordinate of a key vector (a warning says so).
        layers, heads: query heads of layers, default all.

    Returns:
        ``Hooks``, which add to interventions on the rotation (except for ``"uniform"``, ``"first_token"`` and with
        ``fitted_to``) and to hidden keys, but not to other edits of a head's scores.

    Raises:
        ValueError: an unknown rung, or one that cannot be fitted to other texts; invalid texts; what ``drop_component``
            refuses. While running: a text with distances that do not occur in ``fitted_to``.

    Example:
        >>> from tl_posdisent import cut_text, demo_text, load_demo_model
        >>> from tl_posdisent.hooks import substitute_attention
        >>> model = load_demo_model()
        >>> tokens, others = cut_text(model, demo_text(), length=64, texts=7).split([1, 6])
        >>> def loss(hooks):
        ...     return model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).item()
        >>> uniform, additive = (loss(substitute_attention(model, rung)) for rung in ("uniform", "additive"))
        >>> loss([]) < additive < uniform
        True
        >>> substitute_attention(model, "static", fitted_to=others, layers=1)
        substitute_attention(static, fitted_to=6 texts) on 1 layer × 8 heads
    """
    check_choice("by", by, RUNGS if fitted_to is None else get_args(FittedRung))
    if fitted_to is None:
        return rung_hooks(any_heads(model, layers, heads), by)
    layers, reading = listed("layers", layers), read_model(model)
    with naming(tokens="fitted_to"):
        texts = read_texts(reading.model, fitted_to)
    chosen = any_heads(reading, layers, heads)
    stored = fit_layers(reading.model, [group.tokens for group in texts.groups], chosen, by, in_turn=False)
    n_texts = plural(len(texts.tokens), "text")
    return stored_hooks(chosen, stored, f"substitute_attention({by}, fitted_to={n_texts})")


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


def _put_in_hooks(
    chosen: Chosen, edit: Callable[[View], Tensor], *, of_keys: bool, call: str = "substitute_attention(fits)"
) -> Hooks:
    return hooks_for(chosen, call, scores=NewScores(edit, vectors=of_keys, replaces=True))


@dataclass(frozen=True, eq=False)
class StoredAttention:
    """Attention fitted earlier, for some heads of a layer: static heads, or logits of given texts."""

    of: AttentionFit | Float[Tensor, "text head query key"]
    heads: tuple[int, ...]
    of_keys: bool = False  # whether it depends on key vectors
    level: Float64[Tensor, "1 head 1 1"] | None = None  # of the logits beside a learned sink

    def put_in(self, view: View) -> Tensor:
        """Return what replaces the running scores of some of the heads."""
        scores, places = view.scores, [self.heads.index(head) for head in view.heads]
        if isinstance(self.of, Tensor):
            return self.of[:, places]
        inside = fewest_masks(view.inside)
        keys = view.vectors[1] if self.of_keys else scores.new_zeros(len(inside), scores.shape[-1], 1, 0)
        logits = self.of.static_scores(seen_keys(keys, inside), mask=inside, heads=places)
        return logits if self.level is None else logits + self.level[:, places]


def stored_hooks(
    chosen: Chosen, stored: Mapping[int, StoredAttention], call: str = "substitute_attention(fits)"
) -> Hooks:
    """Return hooks that put in the stored attention of these heads."""
    of_keys = any(stored[spec.layer].of_keys for spec, _ in chosen)
    return _put_in_hooks(chosen, partial(_put_in, stored=stored), of_keys=of_keys, call=call)


def _put_in(view: View, stored: Mapping[int, StoredAttention]) -> Tensor:
    return stored[view.spec.layer].put_in(view)


Stored = dict[int, StoredAttention]
"""The stored attention of each layer."""

ScoresAndKeys = tuple[Tensor, Tensor | None]
"""Scores and keys of heads of a layer in texts of equal length."""


def fit_layers(
    model: Any,
    texts: Sequence[Int[Tensor, "_text _pos"]],
    heads_by_layer: Chosen,
    rung: Rung,
    *,
    in_turn: bool,
) -> Stored:
    """Fit a rung to the attention of each layer.

    Args:
        texts: texts in groups of equal length.
        in_turn: whether a layer is fitted in the model whose earlier layers are replaced by their fits, instead of the
            unmodified one.

    Returns:
        One fit of the chosen heads to all texts, or, for rungs with free importances, the logits of each text of a
        single group.
    """
    stored: Stored = {}
    of_keys = rung == "static"
    if len(texts) == 1:  # one pass serves all layers

        def fit(view: View) -> Tensor:
            keys = view.vectors and view.vectors[1]
            fit = stored[view.spec.layer] = _fit(view.spec, view.heads, [(view.scores, keys)], rung)
            return fit.put_in(view) if in_turn else view.scores

        _run_under(model, texts[0], joined([]), heads_by_layer, fit, of_keys=of_keys)
        return stored
    # Texts of several lengths take several passes, which all end before the fits.
    for some in [[one] for one in heads_by_layer] if in_turn else _few_layers(heads_by_layer, texts):
        earlier = [(other, chosen) for other, chosen in heads_by_layer if in_turn and other.layer in stored]
        hooks = stored_hooks(earlier, stored)
        attended = [_attended(model, tokens, some, hooks, with_keys=of_keys) for tokens in texts]
        for spec, heads in some:
            stored[spec.layer] = _fit(spec, heads, [of_text[spec.layer] for of_text in attended], rung)
    return stored


def _few_layers(heads_by_layer: Chosen, texts: Sequence[Tensor]) -> list[Chosen]:
    """Separate layers, as many at a time as there is memory for the scores of all texts."""
    cells = sum(tokens.numel() * tokens.shape[1] for tokens in texts)
    parts, stored = list[Chosen](), 0
    for spec, heads in heads_by_layer:
        needed = 4 * len(heads) * cells
        if not parts or stored + needed > _BYTES_OF_SCORES:
            parts.append([])
            stored = 0
        parts[-1].append((spec, heads))
        stored += needed
    return parts


def _fit(spec: AttentionSpec, heads: Sequence[int], of_texts: Sequence[ScoresAndKeys], rung: Rung) -> StoredAttention:
    """Fit a rung to these heads, given their scores and keys."""
    scores, keys, inside = _side_by_side(spec, of_texts)
    if bool((scores.isneginf() & inside).any()):
        raise ValueError(spec.other_mask(scores.shape[-1]))
    sinks = None if spec.sinks is None else spec.sinks[list(heads)]
    if rung not in PER_HEAD:
        logits = rung_logits(rung, scores, inside, None)
        if sinks is not None:
            logits = logits + sink_level(sinks, scores, logits, inside)
        return StoredAttention(logits.float(), tuple(heads))
    fit, level = fit_rung(rung, scores, inside, keys, pool=True), None
    if sinks is not None:
        features = scores.new_zeros(len(scores), scores.shape[-1], 1, 0) if keys is None else seen_keys(keys, inside)
        logits = fit.static_scores(features, mask=inside)
        level = sink_level(sinks, scores, logits, inside, pool=True)
    return StoredAttention(fit, tuple(heads), of_keys=rung == "static", level=level)


def _attended(
    model: Any, tokens: Int[Tensor, "text pos"], chosen: Chosen, hooks: Hooks, *, with_keys: bool
) -> dict[int, ScoresAndKeys]:
    """Return the scores (and keys) of heads of some layers in a run with hooks on others."""
    seen: dict[int, ScoresAndKeys] = {}

    def keep(view: View) -> Tensor:
        seen[view.spec.layer] = view.scores, view.vectors and view.vectors[1]
        return view.scores

    _run_under(model, tokens, hooks, chosen, keep, of_keys=with_keys)
    return seen


def _run_under(model: Any, tokens: Tensor, hooks: Hooks, chosen: Chosen, edit: Any, *, of_keys: bool) -> None:
    with applied(model, hooks + _put_in_hooks(chosen, edit, of_keys=of_keys)), running(model) as p:
        p.run(tokens, stop=max(spec.layer for spec, _ in chosen) + 1)


def _side_by_side(
    spec: AttentionSpec, of_texts: Sequence[ScoresAndKeys]
) -> tuple[Tensor, Tensor | None, Bool[Tensor, "*mask query key"]]:
    """Pad scores and keys of texts of several lengths, all starting at position 0, into one batch with one mask."""
    longest = max(scores.shape[-1] for scores, _ in of_texts)
    mask = spec.mask(longest, of_texts[0][0].device)
    if len(of_texts) == 1:
        return *of_texts[0], mask
    padded, masks = [], []
    for scores, _ in of_texts:
        missing = longest - scores.shape[-1]
        padded.append(torch.nn.functional.pad(scores, (0, missing, 0, missing)))
        inside = torch.arange(longest, device=mask.device) < scores.shape[-1]
        masks.append((mask & inside & inside[:, None]).expand(len(scores), 1, -1, -1))
    keys = [torch.nn.functional.pad(k, (0, 0, 0, 0, 0, longest - k.shape[1])) for _, k in of_texts if k is not None]
    return torch.cat(padded), torch.cat(keys) if keys else None, torch.cat(masks)
