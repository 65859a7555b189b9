"""What replaces a head: its mean output, or attention by the distance alone, content alone, uniform, or by a gate."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tl_posdisent.hooks.ablate import StandIn, stand_in
from tl_posdisent.hooks.edit import NewResult, NewScores, View
from tl_posdisent.hooks.hook_list import Chosen, Hooks, hooks_for, pairs_of
from tl_posdisent.hooks.positions import remap_distance
from tl_posdisent.hooks.score_components import fewest_masks
from tl_posdisent.hooks.substitute_attention import substitute_attention
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.running.texts import Texts, TokenIds, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.words import plural

MEAN, DISTANCE, UNIFORM, GATE = "mean output", "distance alone", "uniform", "first token's own"
CONSTANTS: Final = (1, 5, 32)
"""Distances at which content alone is tried, in positions: near, further, far. The best of these is within .03 of the
best of eight from 0 to 64 in half of the heads of SmolLM2 and of the demo model."""

_SHORT: Final = 32  # tokens: texts of 8 pull heads that need one thing to the corner where the pattern does not matter


ByReplacement = dict[str, Tensor]
"""Values ``[text, head, ...]`` by the name of the replacement."""


@dataclass(frozen=True, eq=False)
class Fold:
    """Texts to measure, and replacements of heads that were fitted to other texts.

    Attributes:
        rows: of the texts in the batch of all measured texts.
        fitted: the other texts.
        replacements: hooks by name: ``MEAN``, ``DISTANCE``, ``UNIFORM``, ``GATE``, ``content_alone`` of each of
            ``CONSTANTS``.
    """

    texts: Texts
    rows: Sequence[int]
    fitted: Texts
    replacements: dict[str, Hooks]

    def of_another(self, reading: ModelReading, chosen: Chosen) -> Fold:
        """Return the same texts with the replacements of these heads of another model."""
        return replace(self, replacements=replacements(reading, self.fitted, chosen))


def content_alone(distance: float) -> str:
    """Return the name of the replacement that puts every other key than the query's own at one distance."""
    return f"every other key at distance {distance:g}"


def _others_at(distance: float, distances: Tensor) -> Tensor:
    # The own token stays at distance 0: otherwise a head for earlier copies of a token cannot tell them from the token.
    return distances.abs().clamp(max=1) * distance


def folds(
    reading: ModelReading,
    tokens: Tokens,
    heldout: Tokens | None,
    chosen: Chosen,
    ignore: TokenIds | None = None,
) -> tuple[Texts, list[Fold]]:
    """Separate the texts that replacements are fitted to from those that are measured.

    Without ``heldout``, each half of the texts is measured with what was fitted to the other half. A text that is
    longer than all others is cut to the length of the second longest, because a distance profile ends with its texts.
    Predictions at the first token of each text do not count, nor those at tokens to ``ignore``.

    Returns:
        All measured texts, and their folds.

    Raises:
        ValueError: fewer than two measured texts; ``heldout`` that is longer than the texts of the fit.
    """
    texts = read_texts(reading.model, tokens, ignore=ignore).without_first()
    if heldout is not None:
        with naming(tokens="heldout"):
            measured = read_texts(reading.model, heldout, ignore=ignore).without_first()
            _require_two(measured)
        if measured.longest > texts.longest:
            raise ArgumentError(
                "heldout",
                f"must be no longer than tokens, {texts.longest} tokens, got {measured.longest}: attention by the "
                "distance has no value for larger distances. Cut them, or give longer tokens",
            )
        _warn_of_texts(measured, [*texts.unpadded(), *measured.unpadded()])
        return measured, [Fold(measured, range(len(measured.tokens)), texts, replacements(reading, texts, chosen))]
    _require_two(texts)
    texts = texts.cut(sorted(texts.lengths)[-2])
    _warn_of_texts(texts, texts.unpadded())
    by_length = sorted(range(len(texts.tokens)), key=lambda row: -texts.lengths[row])
    halves = [by_length[::2], by_length[1::2]]
    taken = [texts.take(half) for half in halves]
    return texts, [
        Fold(some, half, others, replacements(reading, others, chosen))
        for some, half, others in zip(taken, halves, taken[::-1], strict=True)
    ]


def replacements(reading: ModelReading, fitted: Texts, chosen: Chosen) -> dict[str, Hooks]:
    """Return the hooks that replace the heads, fitted to these texts, by name.

    Raises:
        ValueError: heads whose scores or rotation cannot be changed.
    """
    heads, model = pairs_of(chosen), reading.model
    mean = stand_in(model, [spec.layer for spec, _ in chosen], "mean", fitted, seed=0)
    return {
        MEAN: hooks_for(chosen, "mean output", z=NewResult(partial(_after_first, replace=mean))),
        DISTANCE: substitute_attention(reading, "distance+sink", fitted_to=fitted, heads=heads),
        UNIFORM: substitute_attention(reading, "uniform", heads=heads),
        GATE: hooks_for(chosen, GATE, scores=NewScores(_gate)),
        **{content_alone(d): remap_distance(reading, partial(_others_at, d), heads=heads) for d in CONSTANTS},
    }


def _after_first(layer: int, heads: Sequence[int], z: Tensor, *, replace: StandIn) -> Tensor:
    """Replace z but for the first token, which has one key: no attention can change what a head adds there."""
    return torch.cat([z[:, :1], replace(layer, heads, z)[:, 1:].to(z.dtype)], 1)


def _gate(view: View) -> Tensor:
    """Spread what a query does not pay to the first token evenly over its other keys; a learned sink keeps its part."""
    others = fewest_masks(view.inside).clone()
    others[..., 0] = False
    wide = view.scores.to(torch.promote_types(view.scores.dtype, torch.float32))
    level = wide.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)
    even = (level - others.sum(-1, keepdim=True).log()).to(view.scores.dtype)
    return torch.where(others, even, view.scores)


def over_folds(folds: Sequence[Fold], of_folds: Sequence[Mapping[str, Tensor]]) -> ByReplacement:
    """Combine values ``[head, text, ...]`` of the texts of each fold, in the order of all texts.

    Values by token are padded with NaN.
    """
    order = torch.tensor([row for fold in folds for row in fold.rows]).argsort()
    by_text = {name: [text for values in of_folds for text in values[name].transpose(0, 1)] for name in of_folds[0]}
    return {name: _stacked(texts)[order] for name, texts in by_text.items()}


def _stacked(of_texts: Sequence[Tensor]) -> Tensor:
    if of_texts[0].ndim == 1:
        return torch.stack([*of_texts])
    by_token = [x.transpose(0, 1) for x in of_texts]
    return pad_sequence(by_token, batch_first=True, padding_value=torch.nan).transpose(1, 2)


def _require_two(texts: Texts) -> None:
    if len(texts.tokens) < 2:
        raise ArgumentError(
            "tokens",
            f"must be at least two texts, because errors are over texts, got {plural(len(texts.tokens), 'text')}: give "
            "more, or parts of one: cut_text(model, text)",
        )


def _warn_of_texts(measured: Texts, texts: Sequence[Tensor]) -> None:
    """Warn of measured texts that are short, or that occur twice among those that are measured or fitted."""
    n_texts, mean = len(measured.tokens), sum(measured.lengths) / len(measured.tokens)
    if mean < _SHORT:
        warnings.warn(
            f"texts have {mean:.0f} tokens on average: below about {_SHORT} few keys can be wrong, so that any "
            "attention seems to suffice. Give longer texts",
            stacklevel=4,
        )
    times = Counter(tuple(text.tolist()) for text in texts)
    if equal := sum(times[tuple(text.tolist())] > 1 for text in measured.unpadded()):
        warnings.warn(
            f"{equal} of {plural(n_texts, 'measured text')} occur more than once among the texts: attention by the "
            "distance is then fitted to what it is measured on, and errors are too small. Give different texts",
            stacklevel=4,
        )
