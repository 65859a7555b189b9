"""Sources of single scores: one query's scores as sums over the sources of query and key, and over the distance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Complex128, Float64, Int
from torch import Tensor

from tl_posdisent.experiments.residual_stream.qk_readout import (
    FrozenReadout,
    freeze,
    measure_readouts,
    observe,
    query_key_taps,
    residual_hook,
)
from tl_posdisent.experiments.residual_stream.stream_sources import BIAS, source_part, stream_sources
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.hook_list import OneHead, one_head
from tl_posdisent.models.capture import Captured, for_each_layer
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Tokens, read_texts, token_words
from tl_posdisent.rope.rotary import Rotary, to_complex
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import HasTable, with_ends
from tl_posdisent.utils.tensor_checks import Numbers, real_numbers
from tl_posdisent.utils.validation import check_choice, check_indices, check_integer, check_number, head_label, shown
from tl_posdisent.utils.words import plural

TermsBy = Literal["pair", "query", "key", "source"]
OTHERS = "others"
_SHOWN_KEYS, _SHOWN_PAIRS = 3, 2  # that a repr shows


@dataclass(frozen=True, eq=False, repr=False)
class ScoreSources(HasTable):
    """Scores of one query of a head as sums over pairs of sources and over the distance.

    With the scales of all norms frozen at their values for each token, the query is a sum ``Σ_a q_a`` over the sources
    of the residual stream, and so is each key, ``Σ_b k_b``. The term of a pair splits into its content at a reference
    distance d and what the true distance i − j adds, a sum over the rotary subspaces:
    ``scale · ⟨R(i−j) q_a, k_b⟩ = scale · ⟨R(d) q_a, k_b⟩ + scale · ⟨(R(i−j) − R(d)) q_a, k_b⟩``.
    All terms of a key add up to its score. All tensors are float64.

    Attributes:
        layer, head, query: the head, and the position of the query.
        keys: positions of the keys.
        against: position of the key whose score is subtracted from the others; None to subtract nothing.
        words: the tokens of the text.
        sources: ``"embedding"`` (the stream before the first block; if it is a sum with embeddings of positions,
            ``"positional embedding"`` as well), ``"L0H3"`` for heads of earlier layers, ``"L0 bias"`` for the bias of
            that layer's attention output, ``"L0 MLP"``, and ``"bias"``: the bias of the layer's own queries and keys,
            and the offset of its norm.
        query_parts: ``[source, d_head]``, each source's part of the query before rotation.
        key_parts: ``[source, key, d_head]``, likewise of the keys, and of ``against`` after them.
        own_scores: ``[key]``, the model's own scores of the same keys, before a soft cap.
        distance: the reference distance.
        wavelengths: limits of the bands of wavelengths over which what the distance adds is split.
        removed: for each source that was removed from the stream before the layer, by how much this lowered the scores,
            ``[key]``: here the norms respond.
        scale, rotary: scale of the layer's scores, and its rotation, of no subspace in a layer that does not rotate.
        text, n_texts: index of the text, and number of those given.
    """

    layer: int
    head: int
    query: int
    keys: tuple[int, ...]
    against: int | None
    words: tuple[str, ...]
    sources: tuple[str, ...]
    query_parts: Float64[Tensor, "source d_head"]
    key_parts: Float64[Tensor, "source key d_head"]
    own_scores: Float64[Tensor, " key"]
    distance: float
    wavelengths: tuple[float, ...]
    removed: Mapping[str, Tensor]
    scale: float
    rotary: Rotary
    text: int = 0
    n_texts: int = 1

    @property
    def pieces(self) -> tuple[str, ...]:
        """Names of the pieces of a term: content, and what the distance adds, in all or in each band of wavelengths."""
        if not self.wavelengths:
            return "content", "distance"
        limits = [f"{x:g}" for x in self.wavelengths]
        between = [f"distance_{low}_to_{high}" for low, high in pairwise(limits)]
        return "content", f"distance_below_{limits[0]}", *between, f"distance_from_{limits[-1]}"

    def scores(self) -> Float64[Tensor, " key"]:
        """Return the model's own scores of the keys, minus that of ``against``; before a soft cap."""
        return self._minus_against(self.own_scores)

    def error(self) -> float:
        """Largest difference between the sum of all terms and the model's own score, relative to the largest score."""
        total = self._terms("key", self.key_parts, self._turns()).sum((1, 2))
        least = torch.finfo(torch.float64).tiny
        return float((total - self.own_scores).abs().max() / self.own_scores.abs().max().clamp_min(least))

    def terms(self, by: TermsBy = "pair", *, keys: Sequence[int] | None = None) -> Float64[Tensor, "key piece *source"]:
        """Compute the pieces of the terms, in the order of ``pieces``.

        Args:
            by: ``"pair"``: ``[key, piece, source of the query, source of the key]``. ``"query"``, ``"key"``: ``[key,
                piece, source]`` of that side, summed over the other. ``"source"``: summed over all pairs that have the
                source on either side; these sums overlap, all others add up to the scores.
            keys: indices into the attribute ``keys``; default all, whose pairs may need much memory.
        """
        check_choice("by", by, get_args(TermsBy))
        rows = check_indices("keys", keys, len(self.keys))
        rows += [len(self.keys)] * (self.against is not None)
        return self._minus_against(self._terms(by, self.key_parts[:, rows], self._turns()[rows]))

    def _terms(self, by: str, keys: Tensor, turns: Tensor) -> Float64[Tensor, "key piece *source"]:
        if by == "source":  # the pairs of a source with itself are in both sums
            both = self._terms("query", keys, turns) + self._terms("key", keys, turns)
            return both - self._terms("itself", keys, turns)
        query = self.query_parts.sum(0, keepdim=True) if by == "key" else self.query_parts
        keys = keys.sum(0, keepdim=True) if by == "query" else keys
        (q, q_rest), (k, k_rest) = (to_complex(x, self.rotary) for x in (query, keys))
        b = "a" if by == "itself" else "b"
        out = {"pair": "ab", "query": "a", "key": "b", "itself": "a"}[by]
        terms = torch.einsum(f"ac,jpc,{b}jc->jp{out}", q, turns, k.conj()).real.clone()
        terms[:, 0] += self.scale * torch.einsum(f"ar,{b}jr->j{out}", q_rest, k_rest)
        return terms

    def _turns(self) -> Complex128[Tensor, "key piece subspace"]:
        """Compute the factors of ``q · conj(k)`` in each subspace."""
        angles, device = self.rotary.angles, self.own_scores.device
        keys = torch.tensor(_with(self.keys, self.against), device=device)
        true = angles(torch.full_like(keys, self.query)) - angles(keys)  # each rounded as the model rounds it
        reference = angles(torch.full_like(keys, self.distance, dtype=torch.float64))
        true, reference = (torch.polar(torch.ones_like(angle), angle) for angle in (true, reference))
        limits = torch.tensor(self.wavelengths, dtype=torch.float64, device=device)
        band = torch.bucketize(self.rotary.wavelengths.abs(), limits, right=True)
        added = [(true - reference) * (band == n) for n in range(len(limits) + 1)]
        return self.scale * self.rotary.attention_factor**2 * torch.stack([reference, *added], 1)

    def _minus_against(self, x: Tensor) -> Tensor:
        """Subtract the last key, if it is one to subtract, from the others."""
        return x if self.against is None else x[:-1] - x[-1:]

    def to_frame(self, by: TermsBy = "pair", *, top: int | None = 10) -> pd.DataFrame:
        """Return the largest terms of each key: one row per key and pair, or source.

        ``term`` is the sum of the columns of ``pieces``, and ``score`` what all terms of the key add up to.

        Args:
            by: as in ``terms``. With ``"source"``, ``removed`` is by how much the score falls without the source while
                norms respond, for the sources that were removed; compare it with ``term``, which has the norms frozen.
            top: number of rows of each key, those with the largest absolute term; all others are summed in a last row,
                ``"others"``, unless the sums overlap. None for all rows.
        """
        check_choice("by", by, get_args(TermsBy))
        if top is not None:
            check_integer("top", top, 1)
        table = pd.concat([self._rows(n, by, top) for n in range(len(self.keys))], ignore_index=True)
        first, last = ["key", "query_source", "key_source", "source"], [*self.pieces, "removed", "term"]
        return with_ends(table.assign(error=self.error()), first, last)

    def _rows(self, n: int, by: TermsBy, top: int | None) -> pd.DataFrame:
        """Return the rows of one key."""
        names = {"pair": ["query_source", "key_source"], "source": ["source"]}.get(by, [f"{by}_source"])
        terms = self.terms(by, keys=[n])[0].flatten(1)
        order = terms.sum(0).abs().argsort(descending=True, stable=True)
        first, rest = order[:top], order[len(order) if top is None else top :]
        numbers = [first // len(self.sources), first % len(self.sources)][-len(names) :]
        labels = {name: [self.sources[i] for i in column.tolist()] for name, column in zip(names, numbers, strict=True)}
        values = terms[:, first]
        if len(rest) and by != "source":
            labels = {name: [*sources, OTHERS] for name, sources in labels.items()}
            values = torch.cat([values, terms[:, rest].sum(1, keepdim=True)], 1)
        key = self.keys[n]
        place = {"layer": self.layer, "head": self.head, "query": self.query, "key": key, "token": self.words[key]}
        table = pd.DataFrame({**place, **labels, "term": values.sum(0).tolist()})
        table[list(self.pieces)] = values.T.tolist()
        if by == "source":
            falls = {name: x[n].item() for name, x in self.removed.items()}
            table["removed"] = table["source"].map(falls).astype(float)
        return table.assign(score=self.scores()[n].item())

    def __repr__(self) -> str:
        minus = "" if self.against is None else f", minus the score of {self._named(self.against)}"
        of = f" (text {self.text} of {self.n_texts})" if self.n_texts > 1 else ""
        lines = [
            f"ScoreSources of {head_label(self.layer, self.head)}: query {self._named(self.query)}{of}, "
            f"{plural(len(self.keys), 'key')}{minus}, {plural(len(self.sources), 'source')}; the terms add up to the "
            f"scores within {self.error():.0e}"
        ]
        for n in self.scores().argsort(descending=True)[:_SHOWN_KEYS].tolist():
            pieces = self.terms("key", keys=[n])[0].sum(1).tolist()
            split = ", ".join(f"{name} {x:.2f}" for name, x in zip(self.pieces, pieces, strict=True))
            pairs = self._rows(n, "pair", _SHOWN_PAIRS)[:_SHOWN_PAIRS].itertuples()
            largest = ", ".join(f"{row.query_source} × {row.key_source} {row.term:.2f}" for row in pairs)
            score = self.scores()[n].item()
            lines.append(f"  key {self._named(self.keys[n])}: {score:.2f} ({split})   largest: {largest}")
        return "\n".join(lines)

    def _named(self, position: int) -> str:
        return f"{position} {self.words[position]!r}"


@torch.no_grad()
def score_sources(
    model: Any,
    tokens: Tokens,
    head: OneHead,
    query: int,
    keys: int | Sequence[int] | None = None,
    *,
    against: int | None = None,
    distance: float = 0,
    wavelengths: Numbers | None = None,
    remove: str | Sequence[str] = (),
    text: int = 0,
    attention_mask: Tensor | None = None,
) -> ScoreSources:
    """Split a query's scores of some keys over pairs of sources of query and key, and over the distance, exactly.

    With every norm's scale frozen at its value for each token, queries and keys are affine functions of the residual
    stream, which is the sum of the embedding and of what heads, MLPs and biases of earlier layers add (*sources*). So a
    score is a sum over pairs of sources. Each pair's term is its content, the score that it would have at the reference
    ``distance``, and what the true distance adds. A term is not by how much the score would fall without a source,
    which ``remove`` measures. The maps are measured on the model and checked.

    The cost is four forward passes up to the layer, two of them over ``d_model`` tokens, and one for each source to
    remove. Memory is that of the sources' outputs at the query and the keys.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        tokens, attention_mask: ids ``[batch, pos]``, a text, or texts.
        head: a label such as ``"L3H1"``, or a pair (layer, head).
        query: position of the query in the text, without padding; negative ones count from the end.
        keys: positions of keys, or one; default all that the query sees.
        against: position of another key, to explain how much higher the scores are than its score. A difference of two
            scores is the logarithm of the ratio of their attention (unless there is a soft cap).
        distance: reference distance, at which the content is taken. At 0, RoPE turns neither query nor key.
        wavelengths: limits, ascending and in positions, between bands of rotary wavelengths; what the distance adds is
            split over the bands. Default one band.
        remove: sources to remove, one at a time, from the stream before the layer at the query and the keys.
        text: index of the text.

    Raises:
        ValueError: invalid arguments; keys that the query does not see; a source that the layer does not have; queries
            or keys that are not such a function of the stream (latent attention); a stream that is not the sum of its
            parts (a norm on the stream itself); attention that is not linear in ``hook_z``; scores that are not the
            product of queries and keys (ALiBi), or that hooks edit, as interventions on distances do.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, score_sources
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> found = score_sources(model, tokens, "L3H1", query=40, keys=[39, 12], against=20, remove="L0 MLP")
        >>> found
        ScoreSources of L3H1: query 40 ..., 2 keys, minus the score of 20 ..., 29 sources; the terms add up ...
          key 39 ...
        >>> bool((found.terms().sum((1, 2, 3)) - found.scores()).abs().max() < 1e-4)
        True
        >>> found.to_frame("source", top=1)[["key", "source", "term", "removed"]].shape
        (2, 4)
    """
    reading = read_model(model)
    model, (spec, number) = reading.model, one_head(reading, head)
    scale = spec.require_scale()
    texts = read_texts(model, tokens, attention_mask)
    check_integer("text", text, 0, len(texts.tokens) - 1)
    ids = texts.unpadded()[text][None]
    query, key_positions = _positions(spec, ids.shape[1], query, keys, against)
    check_number("distance", distance)
    limits = _limits(wavelengths)
    removed = _names(remove)
    readouts = measure_readouts(model, spec, ids, query_key_taps(spec, before_norm=True), "score_sources needs")
    held, seen = observe(model, spec, readouts.values(), ids)
    of_query = freeze(spec, readouts["q"], [number], held, seen.q)
    of_key = freeze(spec, readouts["k"], [spec.key_head(number)], held, seen.k)
    if removed and of_key.source != residual_hook(spec.layer):
        raise ArgumentError("remove", f"must be empty for keys that {of_key.source} determines, got {shown(remove)}")
    rows = torch.tensor([query, *key_positions], device=ids.device)
    names, query_parts, key_parts, added = _parts(model, spec, ids, rows, (of_query, of_key), removed)
    own_scores = _row(seen, number, rows, scale)
    falls = {
        name: own_scores - _row(_without(model, spec, ids, rows, x), number, rows, scale) for name, x in added.items()
    }
    if against is not None:
        falls, key_positions = {name: x[:-1] - x[-1] for name, x in falls.items()}, key_positions[:-1]
    rotary = (seen.spec.rotary or Rotary(torch.zeros(0, dtype=torch.float64))).to(own_scores.device)
    words = tuple(token_words(model, ids[0]))
    against = None if against is None else int(rows[-1])
    place = (spec.layer, number, query, tuple(key_positions), against, words, tuple(names))
    parts = (query_parts, key_parts, own_scores)
    return ScoreSources(*place, *parts, float(distance), limits, falls, scale, rotary, text, len(texts.tokens))


def _positions(spec: AttentionSpec, length: int, query: Any, keys: Any, against: Any) -> tuple[int, list[int]]:
    """Return the positions of the query, and of the keys followed by ``against``, all of which the query must see."""
    query = check_integer("query", query, -length, length - 1) % length
    sees = spec.sees(query - torch.arange(length)).nonzero()[:, 0].tolist()
    chosen = sees if keys is None else check_indices("keys", keys, length)
    other = [] if against is None else [check_integer("against", against, -length, length - 1) % length]
    for name, positions in (("keys", chosen), ("against", other)):
        if hidden := [key for key in positions if key not in sees]:
            raise ArgumentError(
                name,
                f"must be positions that query {query} sees in layer {spec.layer}, {sees[0]} to {sees[-1]}, got "
                f"{hidden[0]}",
            )
    return query, [*chosen, *other]


def _limits(wavelengths: Any) -> tuple[float, ...]:
    if wavelengths is None:
        return ()
    limits = real_numbers("wavelengths", wavelengths, torch.device("cpu")).tolist()
    if limits[0] <= 0 or any(a >= b for a, b in pairwise(limits)):
        raise ArgumentError("wavelengths", f"must be ascending numbers above 0, got {shown(wavelengths)}")
    return tuple(limits)


def _names(remove: Any) -> list[str]:
    names = [remove] if isinstance(remove, str) else list(remove) if isinstance(remove, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise ArgumentError("remove", f"must be names of sources, got {shown(remove)}")
    return names


def _parts(
    model: Any,
    spec: AttentionSpec,
    ids: Int[Tensor, "1 pos"],
    rows: Int[Tensor, " row"],
    frozen: tuple[FrozenReadout, FrozenReadout],
    removed: Sequence[str],
) -> tuple[list[str], Float64[Tensor, "source d_head"], Float64[Tensor, "source key d_head"], dict[str, Tensor]]:
    """Return the sources, their parts of the query and of the keys, and what those to be removed have added.

    The query is at the first of the positions ``rows``, the keys are at the others.
    """
    names, parts, added = list[str](), list[list[Tensor]](), dict[str, Tensor]()
    readouts = list(zip(frozen, (rows[:1], rows[1:]), (slice(1), slice(1, None)), strict=True))
    for name, x in stream_sources(model, ids, lambda x: x[0, rows], spec.layer, "score_sources"):
        names.append(name)
        scaled = [(readout, x[part] * readout.stream_scale[0, positions]) for readout, positions, part in readouts]
        parts.append([source_part(readout, name, vectors[:, None])[:, 0] for readout, vectors in scaled])
        added |= {name: x} if name in removed else {}
    if unknown := [name for name in removed if name not in added]:
        raise ArgumentError(
            "remove",
            f"must be sources of the stream before layer {spec.layer}, such as {names[0]!r} or {names[-1]!r}, "
            f"got {shown(unknown[0])}",
        )
    parts.append([readout.constant(readout.norm_scale[0, positions])[:, 0] for readout, positions, _ in readouts])
    query, keys = (torch.stack(side) for side in zip(*parts, strict=True))
    return [*names, BIAS], query[:, 0], keys, added


def _row(seen: Captured, head: int, rows: Int[Tensor, " row"], scale: float) -> Float64[Tensor, " key"]:
    """Compute the scores of the first of some positions as a query and the others as keys, before a soft cap."""
    query, keys = seen.q_rot[0, rows[0], head], seen.k_rot[0, rows[1:], seen.spec.key_head(head)]
    return scale * (keys.double() @ query.double())


def _without(
    model: Any, spec: AttentionSpec, ids: Tensor, rows: Int[Tensor, " row"], added: Float64[Tensor, "row d_model"]
) -> Captured:
    """Run a layer without what a source has added to the stream before it at some positions."""

    def subtract(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        x[0, rows] = (x[0, rows].double() - added).to(x.dtype)
        return x

    captured = list[Captured]()
    with applied(model, [(residual_hook(spec.layer), subtract)]):
        for_each_layer(model, ids, [spec], captured.append, scores=False)
    return captured[0]


def _with(keys: Sequence[int], against: int | None) -> list[int]:
    return [*keys, *([] if against is None else [against])]
