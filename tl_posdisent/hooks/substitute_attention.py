"""Substitute additive attention, with ever more freedom, for the attention of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.additive.attention.result import AttentionFit
from tl_posdisent.additive.attention.rungs import (
    PER_HEAD,
    RUNGS,
    Rung,
    check_rung,
    fit_rung,
    rung_logits,
    seen_keys,
)
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.edits.scores import Order, ScoreEdit, View
from tl_posdisent.hooks.hook_list import Chosen, Heads, Hooks, Layers, any_heads, joined, layer_hooks
from tl_posdisent.hooks.score_components import fewest_masks
from tl_posdisent.models.capture import for_each_layer, for_each_scores
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.utils.validation import check_choice, check_flag, is_integer, shown

BANDS = (1, 2, 4, 8)
"""The distances {0}, {1}, {2, 3}, {4 … 7} and {8 …}."""


def substitute_attention(
    model: Any,
    by: Rung | Mapping[int, AttentionFit],
    *,
    layers: Layers = None,
    heads: Heads = None,
    bands: Sequence[int] = BANDS,
    rank: int = 1,
    extrapolate: bool = False,
) -> Hooks:
    """Replace the attention of heads by the best additive attention, with a given freedom.

    ``by`` names a rung. In every forward pass, each head's pattern is fitted by least Kullback-Leibler divergence
    (``fit_attention``), each text by itself:

    * ``"uniform"``: all keys alike;
    * ``"distance"``: ``softmax(d[i - j])``; ``"distance+sink"``: and a term of the first token;
    * ``"static"``: and ``u · k_j``, linear in the head's key vectors before rotation;
    * ``"additive"``: ``softmax(d[i - j] + k[j])``, with a free importance of each key;
    * ``"banded"``: importances of their own in each band of distances;
    * ``"low-rank"``: and ``u_i · v_j`` of a small rank, added to the banded fit, which stays as it is (a local
      optimum: 100 steps of L-BFGS from the leading singular vectors);
    * ``"untouched"``: the scores as they are, to the last bit.

    Or ``by`` gives fits made before: with features of the keys (static heads, ``fit_attention_layers``) for any text,
    and free importances for texts of the shape of those of the fit.

    The sum of each query's exponentials stays as it is, which only attention sinks beside the keys (GPT-OSS) see.
    Distances are those of the tokens, also under position interventions.

    Args:
        model: HookedTransformer, TransformerBridge or alike, or its ``read_model``.
        by: a rung, or ``{layer: AttentionFit}`` with all heads of the layer.
        layers, heads: query heads of layers, default all, or those of the fits.
        bands: for ``"banded"`` and ``"low-rank"``: distances at which a new band begins.
        rank: for ``"low-rank"``.
        extrapolate: for static heads at distances that were not fitted: raise, or take the nearest that was.

    Returns:
        ``Hooks``: a list for ``fwd_hooks``. On a head they compose with interventions on the rotation (fits made before
        and ``"uniform"`` would undo these, and refuse them), and not with others that replace or patch its scores.

    Raises:
        ValueError: an unknown rung, bands, rank; fits of other layers or numbers of heads; what ``drop_component``
            refuses. While running: texts that a fit does not apply to.

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
    check_flag("extrapolate", extrapolate)
    if isinstance(by, Mapping):
        return _stored_fits(model, by, layers, heads, extrapolate=extrapolate)
    check_rung("by", by, bands, rank)
    chosen = any_heads(model, layers, heads)
    return joined(rung_hooks(spec, some, by, bands, rank) for spec, some in chosen)


def rung_hooks(spec: AttentionSpec, heads: Sequence[int], rung: Rung, bands: Sequence[int], rank: int) -> Hooks:
    """Hooks that fit a rung to the running attention of these heads."""

    def edit(view: View) -> Tensor:
        scores, inside = view.scores(), fewest_masks(view.inside)
        if rung == "untouched":
            return scores
        keys = view.vectors()[1] if rung == "static" else None
        return _with_sums_of(scores, rung_logits(rung, scores, inside, keys, bands=bands, rank=rank), view.inside)

    more: dict[str, Any] = {"scores": True, "vectors": rung == "static", "plain": rung == "uniform"}
    return layer_hooks(spec, heads, ScoreEdit(f"substitute_attention({rung})", edit, Order.REPLACE, **more))


def _with_sums_of(scores: Tensor, logits: Tensor, inside: Tensor) -> Tensor:
    """The logits, moved by a number for each query so that the sum of their exponentials is that of the scores."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    before, after = (x.masked_fill(~inside, -torch.inf).logsumexp(-1, keepdim=True) for x in (wide, logits))
    return torch.where(inside, logits + (before - after), 0.0)


# Fits made before.


@dataclass(frozen=True, eq=False)
class StoredAttention:
    """Attention that was fitted before, for some heads of a layer: static heads, or logits of given texts."""

    of: AttentionFit | Float[Tensor, "text head query key"]
    heads: tuple[int, ...]
    extrapolate: bool = False

    @property
    def direction(self) -> Tensor | None:
        """That of static heads, in which keys count."""
        return self.of.direction if isinstance(self.of, AttentionFit) else None

    def hooks(self, spec: AttentionSpec, heads: Sequence[int]) -> Hooks:
        """Hooks that put it in the place of these heads' attention."""

        def edit(view: View) -> Tensor:
            scores = view.scores()
            return _with_sums_of(scores, self._logits(view, scores), view.inside)

        of_keys = self.direction is not None and self.direction.shape[-1] > 0
        more: dict[str, Any] = {"scores": True, "vectors": of_keys, "plain": True}
        return layer_hooks(spec, heads, ScoreEdit("substitute_attention(fits)", edit, Order.REPLACE, **more))

    def _logits(self, view: View, scores: Tensor) -> Tensor:
        at = [self.heads.index(head) for head in view.heads]
        if isinstance(self.of, AttentionFit) and self.direction is not None:
            inside, length = fewest_masks(view.inside), scores.shape[-1]
            keys = view.vectors()[1] if self.direction.shape[-1] else scores.new_zeros(len(scores), length, 1, 0)
            return self.of.static_scores(seen_keys(keys, inside), mask=inside, heads=at, extrapolate=self.extrapolate)
        logits = self.of.logits() if isinstance(self.of, AttentionFit) else self.of
        logits = (logits if logits.ndim == 4 else logits[None])[:, at]
        if logits.shape != scores.shape or not bool(
            (logits > -torch.inf).expand(scores.shape)[view.inside.expand(scores.shape)].all()
        ):
            raise ValueError(
                f"by must hold fits of texts like the running ones, {tuple(scores.shape)} with their mask, for layer "
                f"{view.spec.layer}, got free importances of {tuple(logits.shape)}: they belong to the keys of their "
                "own texts; static heads (fit_attention with keys=) apply to others"
            )
        return logits


def _stored_fits(
    model: Any, fits: Mapping[int, AttentionFit], layers: Layers, heads: Heads, *, extrapolate: bool
) -> Hooks:
    if not fits or not all(is_integer(x) and isinstance(fit, AttentionFit) for x, fit in fits.items()):
        raise ValueError(f"by must be {', '.join(RUNGS)} or a dict of layers to AttentionFit, got {shown(fits)}")
    chosen = any_heads(model, list(fits) if layers is None else layers, heads)
    hooks = []
    for spec, some in chosen:
        fit = fits.get(spec.layer)
        of_fit = () if fit is None else fit.kl.shape[:-1]
        if fit is None or not 1 <= len(of_fit) <= 2 or of_fit[-1] != spec.n_heads:
            got = "no fit" if fit is None else f"fits with leading axes {tuple(of_fit)}"
            raise ValueError(
                f"by must hold a fit of all {spec.n_heads} heads of layer {spec.layer}, (head,) or (text, head), got "
                f"{got}"
            )
        hooks.append(StoredAttention(fit, tuple(range(spec.n_heads)), extrapolate).hooks(spec, some))
    return joined(hooks)


def stored_hooks(chosen: Chosen, stored: Mapping[int, StoredAttention]) -> Hooks:
    """Hooks that put in what is stored for these layers and heads."""
    return joined(stored[spec.layer].hooks(spec, heads) for spec, heads in chosen)


# Fits of all layers, each in the model whose earlier layers are already replaced.


def fit_attention_layers(
    model: Any,
    tokens: Tokens,
    rung: Rung = "static",
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    replaced: bool = True,
) -> dict[int, AttentionFit]:
    """Fit static heads to texts, to put them into runs on other texts (``substitute_attention``).

    Each head has one distance profile, one direction and one term of the first token for all texts.

    Args:
        model: HookedTransformer, TransformerBridge or alike, or its ``read_model``.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer: one, or a list of any lengths.
        rung: ``"distance"``, ``"distance+sink"`` or ``"static"``, see ``substitute_attention``.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Each text is run without its padding.
        layers: default all.
        heads: query heads that are to be replaced, default all. The fits are of all heads of a layer.
        replaced: fit each layer in the model whose layers before are already replaced; else all in the unmodified
            model.

    Returns:
        ``{layer: AttentionFit}``, pooled over the texts, for ``substitute_attention(model, fits)``.

    Raises:
        ValueError: unusable tokens, layers or heads; a rung whose coefficients belong to one text; what ``capture``
            and ``fit_attention`` refuse.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.hooks import fit_attention_layers, substitute_attention
        >>> model, tokens = load_demo_model(), demo_tokens(length=128)
        >>> fits = fit_attention_layers(model, tokens[:, :96], layers=[3, 4])
        >>> hooks = substitute_attention(model, fits)
        >>> later = tokens[:, 96:]  # a text that was not fitted
        >>> static = model.run_with_hooks(later, return_type="loss", fwd_hooks=hooks).item()
        >>> uniform = substitute_attention(model, "uniform", layers=[3, 4])
        >>> static < model.run_with_hooks(later, return_type="loss", fwd_hooks=uniform).item()
        True
    """
    check_choice("rung", rung, PER_HEAD)
    check_flag("replaced", replaced)
    reading = read_model(model, layers)
    chosen = any_heads(reading, layers, heads)
    texts = [group.tokens for group in read_texts(reading.model, tokens, attention_mask).groups]
    stored = fit_static_heads(reading.model, texts, chosen, rung, replaced=replaced, every=True)
    return {layer: each.of for layer, each in stored.items() if isinstance(each.of, AttentionFit)}


Stored = dict[int, StoredAttention]
"""What is put into each layer."""


def fit_static_heads(
    model: Any,
    texts: Sequence[Int[Tensor, "text pos"]],
    chosen: Chosen,
    rung: Rung,
    *,
    replaced: bool,
    every: bool = False,
) -> Stored:
    """``fit_attention_layers`` for texts in groups of equal length: of every head, or of those chosen alone."""

    def fit(spec: AttentionSpec, heads: list[int], attended: Sequence[_Attended]) -> StoredAttention:
        heads = list(range(spec.n_heads)) if every else heads
        scores, keys, inside = _side_by_side(spec, attended)
        if keys is not None:
            keys = keys[..., [head // (spec.n_heads // keys.shape[-2]) for head in heads], :]
        of = fit_rung(rung, scores[:, heads], inside, keys, bands=(), pool=True)
        return StoredAttention(of, tuple(heads))

    return _fit_in_turn(model, texts, chosen, fit, with_keys=rung == "static", replaced=replaced)


def fit_texts(
    model: Any,
    tokens: Int[Tensor, "text pos"],
    chosen: Chosen,
    rung: Rung,
    *,
    bands: Sequence[int],
    rank: int,
    replaced: bool,
) -> Stored:
    """The logits of a rung with free importances for each of these texts."""

    def fit(spec: AttentionSpec, heads: list[int], attended: Sequence[_Attended]) -> StoredAttention:
        ((scores, _),) = attended
        inside = spec.mask(scores.shape[-1], scores.device)
        logits = rung_logits(rung, scores[:, heads], inside, None, bands=bands, rank=rank).float()
        return StoredAttention(logits, tuple(heads))

    return _fit_in_turn(model, [tokens], chosen, fit, with_keys=False, replaced=replaced)


_Attended = tuple[Tensor, Tensor | None]
"""Scores and keys of a layer in texts of equal length."""


def _fit_in_turn(
    model: Any, texts: Sequence[Tensor], chosen: Chosen, fit: Any, *, with_keys: bool, replaced: bool
) -> Stored:
    """Fit layer after layer; if they are to be replaced, each in a run with those before put in."""
    stored: Stored = {}
    at_once = [[each] for each in chosen] if replaced else [list(chosen)]
    for some in at_once:
        hooks = stored_hooks([each for each in chosen if each[0].layer in stored] if replaced else [], stored)
        seen = [_attended(model, tokens, [spec for spec, _ in some], hooks, with_keys=with_keys) for tokens in texts]
        for spec, heads in some:
            stored[spec.layer] = fit(spec, list(heads), [each.pop(spec.layer) for each in seen])
    return stored


def _attended(
    model: Any, tokens: Int[Tensor, "text pos"], specs: list[AttentionSpec], hooks: Hooks, *, with_keys: bool
) -> dict[int, _Attended]:
    found: dict[int, _Attended] = {}
    with applied(model, hooks):
        if with_keys:
            for_each_layer(model, tokens, specs, lambda x: found.update({x.layer: (x.scores, x.k)}))
        else:
            for_each_scores(model, tokens, specs, lambda spec, scores: found.update({spec.layer: (scores, None)}))
    return found


def _side_by_side(
    spec: AttentionSpec, attended: Sequence[_Attended]
) -> tuple[Tensor, Tensor | None, Bool[Tensor, "*mask query key"]]:
    """Scores, keys and mask of texts of unequal lengths, all beginning at 0."""
    longest = max(scores.shape[-1] for scores, _ in attended)
    mask = spec.mask(longest, attended[0][0].device)
    if len(attended) == 1:
        return *attended[0], mask
    scores, masks = [], []
    for each, _ in attended:
        room = longest - each.shape[-1]
        scores.append(torch.nn.functional.pad(each, (0, room, 0, room)))
        inside = torch.arange(longest, device=mask.device) < each.shape[-1]
        masks.append((mask & inside & inside[:, None]).expand(len(each), 1, -1, -1))
    keys = [torch.nn.functional.pad(k, (0, 0, 0, 0, 0, longest - k.shape[1])) for _, k in attended if k is not None]
    return torch.cat(scores), torch.cat(keys) if keys else None, torch.cat(masks)
