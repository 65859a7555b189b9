"""Attention of heads fitted to some texts, put in place of their attention on other texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tl_posdisent.additive.attention.result import AttentionFit
from tl_posdisent.additive.attention.rungs import PER_HEAD, Rung, fit_rung, rung_logits, seen_keys
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.edit import NewScores, View
from tl_posdisent.hooks.hook_list import Chosen, Heads, Hooks, any_heads, hooks_for, joined
from tl_posdisent.hooks.score_components import fewest_masks
from tl_posdisent.hooks.substitute import sink_level
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.utils.validation import check_choice, listed

FittedRung = Literal["distance", "distance+sink", "static"]


def fitted_attention(
    model: Any,
    tokens: Tokens,
    by: FittedRung = "static",
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Replace the attention of heads by attention that does not depend on the query, fitted to given texts.

    Each head's pattern on ``tokens`` is fitted by minimum Kullback-Leibler divergence (``fit_attention``), in the
    unmodified model. The result applies to other texts, as long as they are no longer than these:

    * ``"distance"``: ``softmax(d[i - j])``;
    * ``"distance+sink"``: adds a term for the first token;
    * ``"static"``: adds ``u · k_j``, linear in the head's key vectors before rotation.

    ``substitute_attention`` fits the running text instead.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        tokens: texts to fit, as in ``head_ablation``; for ``"static"``, at least four keys per coordinate of a key
            vector (a warning says so).
        by: what the fitted attention depends on.
        attention_mask: for padded ids.
        layers, heads: query heads of layers, default all.

    Returns:
        ``Hooks``, as those of ``substitute_attention``.

    Raises:
        ValueError: another ``by``; invalid tokens; what ``drop_component`` refuses. While running: a text with
            distances that do not occur in ``tokens``.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.hooks import fitted_attention, substitute_attention
        >>> model, tokens = load_demo_model(), demo_tokens(length=512).view(4, 128)
        >>> hooks = fitted_attention(model, tokens[:3], "static", layers=1)
        >>> hooks
        fitted_attention(static) on 1 layer × 8 heads
        >>> def loss(hooks):
        ...     return model.run_with_hooks(tokens[3:], return_type="loss", fwd_hooks=hooks).item()
        >>> loss(hooks) < loss(substitute_attention(model, "uniform", layers=1))
        True
    """
    check_choice("by", by, get_args(FittedRung))
    layers = listed("layers", layers)
    reading = read_model(model)
    chosen, texts = any_heads(reading, layers, heads), read_texts(reading.model, tokens, attention_mask)
    stored = fit_layers(reading.model, [group.tokens for group in texts.groups], chosen, by, in_turn=False)
    return stored_hooks(chosen, stored, f"fitted_attention({by})")


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
        keys = view.vectors[1] if self.of_keys else scores.new_zeros(len(scores), scores.shape[-1], 1, 0)
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
    for spec, heads in heads_by_layer:  # texts of several lengths take several passes, which all end before the fit
        earlier = [(other, chosen) for other, chosen in heads_by_layer if in_turn and other.layer in stored]
        hooks = stored_hooks(earlier, stored)
        attended = [_attended(model, tokens, spec, heads, hooks, with_keys=of_keys) for tokens in texts]
        stored[spec.layer] = _fit(spec, heads, attended, rung)
    return stored


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
    model: Any,
    tokens: Int[Tensor, "text pos"],
    spec: AttentionSpec,
    heads: list[int],
    hooks: Hooks,
    *,
    with_keys: bool,
) -> ScoresAndKeys:
    """Return the scores (and keys) of heads of a layer in a run with hooks on others."""
    seen: list[ScoresAndKeys] = []

    def keep(view: View) -> Tensor:
        seen.append((view.scores, view.vectors and view.vectors[1]))
        return view.scores

    _run_under(model, tokens, hooks, [(spec, heads)], keep, of_keys=with_keys)
    return seen[0]


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
