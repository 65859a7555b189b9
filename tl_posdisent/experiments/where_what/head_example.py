"""Why a head looks where it looks at one query: content and distance, sources of the scores, and what it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.residual_stream.score_sources import ScoreSources, score_sources
from tl_posdisent.experiments.where_what.direct_effect import DirectEffect, direct_effect
from tl_posdisent.experiments.where_what.sentences import nats
from tl_posdisent.hooks.score_components import split_two_axis
from tl_posdisent.models.capture import Captured, for_each_layer, some_heads
from tl_posdisent.models.patterns import Pattern, for_each_pattern
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Texts, token_words
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer, shown

_SOURCES: Final = 3  # of each side that a sentence names


@dataclass(frozen=True, eq=False)
class HeadExample:
    """One query of a head, the key it looks at, and another key that it might have looked at.

    With the two-axis model (``substitute_additive``), the score of query q and key k at distance d is ``mean + q's own
    part + g(q, k) + f(q, d)`` and a rest: g is the score averaged over distances, f that of the mean key. Differences
    between the two keys are of scores before a soft cap, in nats of attention.

    Attributes:
        text: row of the measured texts.
        query, key, other: positions in this text, without padding. ``other`` is the key of the largest g, or, if that
            is ``key``, that of the next largest attention.
        prefers: the key of the largest g.
        words: tokens of the text.
        contribution: KL(unmodified ‖ mean output) of the prediction at the query, nats; None at the last position.
        attention: of the query to every position of the text.
        content, distance, rest: g, f and the rest of ``key`` minus those of ``other``; the sum is the difference of
            their scores.
        sources: the same difference as a sum over sources of the residual stream (``score_sources``); None if this
            model's scores cannot be split, and ``without_sources`` says why.
        effect: what the head adds directly to the logits at the query; None if it cannot be computed, and
            ``without_effect`` says why.
        effect_words: tokens whose logit ``effect`` is reported for, by their id.
    """

    text: int
    query: int
    key: int
    other: int
    prefers: int
    words: tuple[str, ...]
    contribution: float | None
    attention: Float64[Tensor, " pos"]
    content: float
    distance: float
    rest: float
    sources: ScoreSources | None
    without_sources: str
    effect: DirectEffect | None
    without_effect: str
    effect_words: dict[int, str]

    def sentences(self) -> list[str]:
        """Say in words why the head looks at the key, and what it writes."""
        return [self._looks_at(), self._compared(), self._sources(), self._effect()]

    def _looks_at(self) -> str:
        cost = "" if self.contribution is None else f", where it contributes {nats(self.contribution)} nats"
        return (
            f"At the query {self.words[self.query]!r} (text {self.text}, position {self.query}{cost}), it looks at "
            f"{self._key(self.key)}."
        )

    def _compared(self) -> str:
        key, other = self.words[self.key], self._key(self.other)
        if self.prefers == self.key:
            begin = "Content, averaged over distances, prefers it too: "
            begin += f"compared with {other}, content adds {_signed(self.content)}"
        else:
            begin = f"By content, averaged over distances, it prefers {other} by {_signed(-self.content, plus=False)}"
        total = self.content + self.distance + self.rest
        named = self._key(self.key) if key == self.words[self.other] else repr(key)
        return (
            f"{begin}; the distance adds {_signed(self.distance)} for {named} and what depends on both "
            f"{_signed(self.rest)}, together {_signed(total)}."
        )

    def _sources(self) -> str:
        if self.sources is None:
            return f"The sources of this difference are unknown: {self.without_sources}."
        sides = (f"of the query {self._largest('query')}", f"of the key {self._largest('key')}")
        return f"Largest sources of this difference: {'; '.join(sides)}."

    def _largest(self, side: Any) -> str:
        assert self.sources is not None
        terms = self.sources.terms(side)[0].sum(0)
        order = terms.abs().argsort(descending=True, stable=True)[:_SOURCES].tolist()
        return ", ".join(f"{self.sources.sources[n]} {_signed(terms[n].item())}" for n in order)

    def _effect(self) -> str:
        effect = self.effect
        if effect is None:
            return f"What it writes is unknown: {self.without_effect}."
        roles = {"the next token": effect.next_token, "the most likely": effect.likely_token}
        roles["raised most"] = effect.raised_token
        parts = [
            f"{word!r} ({' and '.join(role for role, x in roles.items() if x == token)}) "
            f"{_signed(float(effect.logits[token]))}"
            for token, word in self.effect_words.items()
        ]
        return f"It writes directly to logits, relative to their mean: {', '.join(parts)}."

    def _key(self, key: int) -> str:
        distance = self.query - key
        return f"{self.words[key]!r} (distance {distance}, attention {self.attention[key]:.2f})"


class Place(NamedTuple):
    """A query to explain: its text, its position there, and that of a key; None for that of the largest attention."""

    text: int
    query: int
    key: int | None


def check_place(spec: AttentionSpec, texts: Texts, query: Any, key: Any) -> Place:
    """Validate a query, as a pair (text, position), and a key or None, each without running the model.

    Raises:
        ValueError: a text or position that is not there; a query that sees a single key; a key that it does not see.
    """
    if not isinstance(query, (tuple, list)) or len(query) != 2:
        raise ArgumentError("query", f"must be a pair (text, position), got {shown(query)}")
    text = check_integer("query", query[0], 0, len(texts.tokens) - 1, why="the measured texts")
    length = texts.lengths[text]
    position = check_integer("query", query[1], -length, length - 1, why="positions of this text") % length
    sees = spec.sees(position - torch.arange(length))
    if int(sees.sum()) < 2:
        raise ArgumentError("query", f"must see two keys or more, got position {position}, which sees one")
    key = None if key is None else check_integer("key", key, -length, length - 1) % length
    if key is not None and not sees[key]:
        raise ArgumentError("key", f"must be a position that query {position} sees, got {key}")
    return Place(text, position, key)


def measure_example(reading: ModelReading, spec: AttentionSpec, head: int, texts: Texts, place: Place) -> HeadExample:
    """Explain one query of a head."""
    model = reading.model
    text, query, key = place
    ids = texts.unpadded()[text][None]
    sees = spec.sees(query - torch.arange(ids.shape[1]))
    attention = _attention(model, spec, head, ids, query)
    largest = attention.masked_fill(~sees, -1.0).argsort(descending=True).tolist()
    key = largest[0] if key is None else key
    content, distance, scores = _parts(model, spec, head, ids, query)
    prefers = int(content.masked_fill(~sees, -torch.inf).argmax())
    other = prefers if prefers != key else next(x for x in largest if x != key)
    of_content, of_distance, whole = (float(x[key] - x[other]) for x in (content, distance, scores))
    rest = whole - of_content - of_distance
    sources, without_sources = _sources(reading, spec, head, ids, query, key, other)
    effect, without_effect = _effect(model, spec, head, ids, query)
    return HeadExample(
        text,
        query,
        key,
        other,
        prefers,
        tuple(token_words(model, ids[0])),
        None,
        attention,
        of_content,
        of_distance,
        rest,
        sources,
        without_sources,
        effect,
        without_effect,
        {} if effect is None else _effect_words(model, ids, effect),
    )


def _attention(model: Any, spec: AttentionSpec, head: int, ids: Tensor, query: int) -> Float64[Tensor, " pos"]:
    """Return the attention of a query of a head to every position."""
    rows = list[Tensor]()

    def keep(_: AttentionSpec, pattern: Pattern) -> None:
        rows.append(pattern[0, head, query].double().cpu())

    for_each_pattern(model, ids, [spec], keep)
    return rows[0]


def _parts(model: Any, spec: AttentionSpec, head: int, ids: Tensor, query: int) -> list[Float64[Tensor, " pos"]]:
    """Return the content part and the distance part of a query's scores with all keys, and the scores."""
    found = list[Captured]()
    for_each_layer(model, ids, [spec], found.append, scores=False)
    layer = some_heads(found[0], [head])
    q, k, length = layer.q.double(), layer.k.double(), ids.shape[1]
    parts = split_two_axis(spec, q, k, spec.mask(length, q.device))
    positions = torch.arange(length, device=q.device)
    q_rot, k_rot = spec.rotated(q, positions)[0, query, 0], spec.rotated(k, positions)[0, :, 0]
    scores = k_rot @ q_rot * spec.require_scale()
    return [x.cpu() for x in (parts.key[0, 0, query], parts.distance[0, 0, query], scores)]


def _sources(
    reading: ModelReading, spec: AttentionSpec, head: int, ids: Tensor, query: int, key: int, other: int
) -> tuple[ScoreSources | None, str]:
    """Split the difference of two scores over sources, or say why that is impossible."""
    try:
        return score_sources(reading, ids, (spec.layer, head), query, [key], against=other), ""
    except ValueError as error:
        return None, str(error)


def _effect(model: Any, spec: AttentionSpec, head: int, ids: Tensor, query: int) -> tuple[DirectEffect | None, str]:
    """Compute the direct effect on the logits, or say why that is impossible."""
    try:
        return direct_effect(model, ids, spec.layer, head, query), ""
    except ValueError as error:
        return None, str(error)


def _effect_words(model: Any, ids: Tensor, effect: DirectEffect) -> dict[int, str]:
    tokens = [x for x in (effect.next_token, effect.likely_token, effect.raised_token) if x is not None]
    return dict(zip(tokens, token_words(model, ids.new_tensor(tokens)), strict=True))


def _signed(value: float, *, plus: bool = True) -> str:
    """Format a number with two decimals and its sign."""
    return f"{round(value, 2) + 0.0:{'+' if plus else ''}.2f}".replace("-", "−")
