"""Where the distance profile of a head comes from: a sum over sources of its mean query and of its mean key.

``distance_sources_check`` removes a source from the model and measures the profile again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Complex128, Float64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.hook_list import Heads
from tl_posdisent.models.capture import Captured, for_each_layer
from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Texts, Tokens, read_texts
from tl_posdisent.rope.rotary import Rotary, to_complex
from tl_posdisent.rope.variance_decomposition import Numbers, numbers, share_of
from tl_posdisent.utils.validation import check_choice, check_integer

from .qk_readout import Readout, Side, keep, measure_readouts, residual_hook, taps_of
from .stream_sources import EMBEDDING, Batch, parse_source, tokens_of_source, weighted_sources

BIAS = "bias"
_ROUNDING = 1e-13


@dataclass(frozen=True, eq=False, repr=False)
class DistanceSources:
    """The distance profile of heads of one layer as a sum over pairs of sources.

    The profile of a head is its mean score at each distance, over all combinations of queries and keys of the texts:
    ``profile[d] = scale · ⟨R(d) mean query, mean key⟩``, the distance effect of ``controlled_distance`` plus its mean.
    With the scales of all norms frozen, the mean query is a sum over sources, the mean key too, and the profile is the
    sum of ``term(a, b)[d] = scale · ⟨R(d) query_a, key_b⟩`` over all pairs. All tensors are float64.

    Attributes:
        layer: its number.
        heads: the query heads.
        sources: names: ``"embedding"`` (the stream before the first block), ``"L0H3"`` for heads of earlier layers,
            ``"L0 bias"`` for the bias of that layer's attention output, ``"L0 MLP"``, and ``"bias"``: the bias of the
            layer's own queries and keys, and the offset of its norm.
        distances: ``[distance]``, in tokens.
        query, key: ``[source, head, d_head]``, each source's part of the mean query and key before rotation, one key
            head per query head.
        own_query, own_key: ``[head, d_head]``, the means of the model's own queries and keys.
        scale: what products are multiplied by.
        rotary: the layer's rotation.
    """

    layer: int
    heads: tuple[int, ...]
    sources: tuple[str, ...]
    distances: Float64[Tensor, "distance"]
    query: Float64[Tensor, "source head d_head"]
    key: Float64[Tensor, "source head d_head"]
    own_query: Float64[Tensor, "head d_head"]
    own_key: Float64[Tensor, "head d_head"]
    scale: float
    rotary: Rotary

    def profile(self) -> Float64[Tensor, "head distance"]:
        """The controlled profile, from the model's own mean queries and keys, in units of the scores."""
        return self.profile_of(self.own_query, self.own_key)

    def total(self) -> Float64[Tensor, "head distance"]:
        """The sum of the terms of all pairs of sources."""
        return self.profile_of(self.query.sum(0), self.key.sum(0))

    def term(self, query_source: str, key_source: str) -> Float64[Tensor, "head distance"]:
        """The part of the profile that one source of the query and one source of the key make together."""
        return self.profile_of(self.query[self._index(query_source)], self.key[self._index(key_source)])

    def profile_of(
        self, query: Float64[Tensor, "row d_head"], key: Float64[Tensor, "row d_head"]
    ) -> Float64[Tensor, "row distance"]:
        """Scores of queries and keys before rotation, row by row, at each of the distances."""
        (q, q_rest), (k, k_rest) = (to_complex(x, self.rotary) for x in (query, key))
        still = self.scale * (q_rest * k_rest).sum(-1, keepdim=True)
        return ((q * k.conj()) @ self._turns().T).real + still

    def error(self) -> Float64[Tensor, "head"]:
        """Largest difference of the sum of all terms from the profile, over the profile's largest value.

        Rounding of the model: about 1e-6 in float32, 1e-14 in float64.
        """
        profile = self.profile()
        return share_of((self.total() - profile).abs().amax(-1), profile.abs().amax(-1))

    def shares(self) -> Float64[Tensor, "head source source"]:
        """``[head, source of the query, source of the key]``: a pair's covariance with the profile over the profile's
        variance, both over the distances. Shares of a head add up to 1; terms that cancel have negative ones. NaN for a
        profile that does not vary."""
        profile, turn = self.total(), self._turns()
        centred = profile - profile.mean(-1, keepdim=True)
        variance = centred.square().mean(-1)
        largest = self.scale * self.rotary.attention_factor**2 * self.own_query.norm(dim=-1) * self.own_key.norm(dim=-1)
        flat = variance.sqrt() <= _ROUNDING * largest.abs()  # no value of the profile is larger
        with_profile = torch.einsum("dc,hd->hc", turn, centred.to(turn.dtype)) / len(self.distances)
        q, k = (to_complex(x, self.rotary)[0] for x in (self.query, self.key))
        products = torch.einsum("ahc,hc,bhc->hab", q, with_profile, k.conj()).real
        return torch.where(flat[:, None, None], torch.nan, products / variance[:, None, None])

    def source_shares(self) -> Float64[Tensor, "head source"]:
        """The share of all pairs in which a source takes part, of the query or of the key: what goes with it."""
        shares = self.shares()
        return shares.sum(-1) + shares.sum(-2) - shares.diagonal(dim1=-2, dim2=-1)

    def to_frame(
        self, by: Literal["pair", "query", "key", "source"] = "pair", *, top: int | None = None
    ) -> pd.DataFrame:
        """Shares of the profile's variance over the distances, the largest first in each head.

        Args:
            by: ``"pair"`` has one row per head, source of the query and source of the key; ``"query"`` and ``"key"``
                one per source of that side, summed over the other; ``"source"`` one per source, of all pairs in which
                it takes part on either side.
            top: rows per head, those with the largest absolute share; default all.

        Returns:
            ``layer``, ``head``, the source or sources, ``share``, and ``error``, the head's ``error()``. Pairs also
            have ``mean``, the term's mean over the distances, and ``std``, its standard deviation over that of the
            profile.
        """
        check_choice("by", by, ("pair", "query", "key", "source"))
        if top is not None:
            check_integer("top", top, 1)
        if by == "source":
            shares = self.source_shares()
        else:
            shares = self.shares() if by == "pair" else self.shares().sum(-1 if by == "query" else -2)
        tables = [self._rows(at, x, by, top) for at, x in enumerate(shares)]
        return pd.concat(tables, ignore_index=True)

    def _rows(self, at: int, shares: Tensor, by: str, top: int | None) -> pd.DataFrame:
        order = shares.flatten().abs().nan_to_num(nan=-1.0).argsort(descending=True, stable=True)[:top]
        index = torch.unravel_index(order, shares.shape)
        names = [f"{by}_source"] if by != "pair" else ["query_source", "key_source"]
        names = ["source"] if by == "source" else names
        sides = {name: [self.sources[i] for i in x.tolist()] for name, x in zip(names, index, strict=True)}
        columns: dict[str, Any] = {"share": shares.flatten()[order].tolist()}
        if by == "pair":
            columns |= self._sizes(at, *index)
        head = {"layer": self.layer, "head": self.heads[at]}
        return pd.DataFrame({**head, **sides, **columns, "error": float(self.error()[at])})

    def _sizes(self, at: int, query: Tensor, key: Tensor) -> dict[str, list[float]]:
        own = self.total()[at].std(correction=0)
        means, deviations = [], []
        step = max(1, 2**22 // len(self.distances))
        for a, b in zip(query.split(step), key.split(step), strict=True):
            terms = self.profile_of(self.query[a, at], self.key[b, at])
            means.append(terms.mean(-1))
            deviations.append(share_of(terms.std(-1, correction=0), own))
        return {"mean": torch.cat(means).tolist(), "std": torch.cat(deviations).tolist()}

    def _turns(self) -> Complex128[Tensor, "distance subspace"]:
        angle = self.rotary.angles(self.distances)
        return self.scale * self.rotary.attention_factor**2 * torch.polar(torch.ones_like(angle), angle)

    def _index(self, source: str) -> int:
        check_choice("source", source, self.sources)
        return self.sources.index(source)

    def _repr_html_(self) -> str:
        return self.to_frame(top=3).round(3).to_html(index=False)

    def __repr__(self) -> str:
        table = self.to_frame(top=1).sort_values("share", key=abs, ascending=False).head(3)
        largest = "   ".join(
            f"L{self.layer}H{row.head} {row.query_source} × {row.key_source} {row.share:.2f}"
            for row in table.itertuples()
        )
        return (
            f"DistanceSources of layer {self.layer}: {len(self.heads)} heads, {len(self.sources)} sources of queries "
            f"and keys, {len(self.distances)} distances\n  largest: {largest}"
        )


@torch.no_grad()
def distance_sources(
    model: Any,
    tokens: Tokens,
    layer: int,
    *,
    attention_mask: Tensor | None = None,
    distances: Numbers | None = None,
    heads: Heads = None,
    sinks: int = 0,
) -> DistanceSources:
    """Split the distance profile of a layer's heads over the sources of their mean query and mean key, exactly.

    The profile is the mean score at each distance when every query meets every key at it (see ``controlled_distance``):
    a function of the mean query and the mean key alone. With every norm's scale frozen at its value for each token
    (pre-norm, QK-norm, and a norm after the attention of earlier layers), queries and keys are affine functions of the
    residual stream, and this is the sum of the embedding and of what earlier heads, MLPs and biases added. The mean
    query and the mean key therefore split over these sources, and the profile over their pairs. The maps are measured
    on the model and checked; two passes over the texts, and no score is kept.

    Zeroing a source takes its terms away from the profile, but also changes the scales and all that later layers make
    of it: ``distance_sources_check`` measures both.

    Args:
        model: HookedTransformer, TransformerBridge or alike, or its ``read_model``; with rotary embeddings.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer: one, or a list of any lengths.
            Queries and keys of all texts are pooled.
        layer: 0 … n_layers - 1; negative ones count from the end.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Each text is run without its padding.
        distances: default 0 up to those of the longest text; any finite numbers.
        heads: query heads, integers or pairs ``(layer, head)`` of this layer; default all.
        sinks: positions to leave out at the beginning of each text, as in ``controlled_distance``.

    Returns:
        ``DistanceSources``: ``profile()``, ``term(query_source, key_source)``, ``shares()``, ``error()``,
        ``to_frame()``; ``plot_distance_sources`` draws its table.

    Raises:
        ValueError: unusable tokens, layer, heads or distances; ``sinks`` that leaves nothing; a layer without rotary
            embeddings; queries or keys that are no such function of the stream (latent attention), a stream that is not
            the sum of its parts (a norm on the stream itself), attention that is not linear in ``hook_z``; texts of
            lengths at which the model rotates differently.

    Example:
        >>> from tl_posdisent import demo_tokens, distance_sources, load_demo_model
        >>> found = distance_sources(load_demo_model(), demo_tokens(length=128), 1, heads=[3])
        >>> found
        DistanceSources of layer 1: 1 heads, 1... sources of queries and keys, 128 distances
          largest: L1H3 L0 MLP × L0 MLP ...
        >>> total = sum(found.term(a, b) for a in found.sources for b in found.sources)
        >>> bool((total - found.profile()).abs().max() < 1e-4)
        True
        >>> table = found.to_frame()
        >>> bool(table.groupby("head")["share"].sum().round(6).eq(1).all()), bool(table["error"].max() < 1e-5)
        (True, True)
    """
    reading = read_model(model, [layer])
    (spec,) = reading.rotary([layer], "distance_sources")
    scale = spec.require_scale()
    chosen = tuple(reading.heads([spec.layer], heads)[spec.layer])
    texts = read_texts(reading.model, tokens, attention_mask)
    check_integer("sinks", sinks, 0, min(texts.lengths) - 1)
    sides: dict[Side, list[int]] = {"q": list(chosen), "k": [spec.key_head(head) for head in chosen]}
    read = _read_texts(reading.model, spec, texts, sides, sinks)
    names, sums = weighted_sources(reading.model, read.batches, spec.layer, "distance_sources")
    sums_of_sides = sums.tensor_split([read.readouts["q"].n_weights], 1)
    query, key = (_split(read, side, names, x) for side, x in zip(sides, sums_of_sides, strict=True))
    at = numbers("distances", range(texts.longest) if distances is None else distances, query.device)
    return DistanceSources(
        spec.layer, chosen, (*names, BIAS), at, query, key, read.own["q"], read.own["k"], scale, read.rotary
    )


@dataclass(frozen=True)
class _Read:
    """The texts as the layer reads them, with weights that add up to 1.

    Attributes:
        readouts: how queries and keys of the chosen heads come from the stream.
        batches: tokens of texts of equal length, and their weights in the mean query and then in the mean key.
        bias: weight of the bias.
        own: the mean queries and keys.
        rotary: the rotation of these texts.
    """

    readouts: dict[Side, Readout]
    batches: list[Batch]
    bias: dict[Side, Tensor]
    own: dict[Side, Tensor]
    rotary: Rotary


def _read_texts(model: Any, spec: AttentionSpec, texts: Texts, heads: dict[Side, list[int]], sinks: int) -> _Read:
    """Measure the layer's read-out, and run the texts up to the layer."""
    count = sum(length - sinks for length in texts.lengths)
    taps, first = taps_of(spec, before_norm=True), texts.groups[0].tokens
    readouts = measure_readouts(model, spec, first, taps, "distance_sources needs")
    names = [tap.name for tap in taps.values()] + [readout.source for readout in readouts.values()]
    batches: list[Batch] = []
    rotary: Rotary | None = None
    bias, own = (dict.fromkeys(heads, torch.zeros((), dtype=torch.float64)) for _ in range(2))
    for group in texts.groups:
        held: dict[str, Tensor] = {}
        found: list[Captured] = []
        with applied(model, [keep(name, held) for name in dict.fromkeys(names)]):
            for_each_layer(model, group.tokens, [spec], found.append, scores=False)
        (seen,) = found
        vectors: dict[Side, Tensor] = {"q": seen.q, "k": seen.k}
        weights = []
        for side, tap in taps.items():
            plain, some = tap.read(held[tap.name]), heads[side]
            if not batches:
                readouts[side] = readouts[side].with_qk_norm(spec, plain, vectors[side])
            readout = readouts[side]
            x = readout.weights(spec, held[readout.source], plain, vectors[side])
            w, r = (y[..., some] / count if readout.qk_norm else y / count for y in x)
            w[:, :sinks] = 0
            weights.append(w)
            bias[side] = bias[side] + r[:, sinks:].sum((0, 1))
            own[side] = own[side] + vectors[side][:, sinks:, some].double().sum((0, 1)) / count
        batches.append(Batch(group.tokens, torch.cat(weights, -1)))
        own_rotary = seen.spec.require_rotary("distance_sources")
        rotary = rotary or own_rotary
        same = torch.equal(rotary.frequencies, own_rotary.frequencies)
        if not same or rotary.attention_factor != own_rotary.attention_factor:
            raise ValueError(
                f"tokens must be texts that layer {spec.layer} of {spec.architecture} rotates alike for "
                "distance_sources, got texts of lengths at which its frequencies differ: call it for each length"
            )
    assert rotary is not None
    readouts = {side: readout.of_heads(heads[side]) for side, readout in readouts.items()}
    return _Read(readouts, batches, bias, own, rotary.to(own["q"].device))


def _split(
    read: _Read, side: Side, names: Sequence[str], sums: Float64[Tensor, "source weight d_model"]
) -> Float64[Tensor, "source+1 head d_head"]:
    """The mean query or key of each source, and of the bias."""
    readout = read.readouts[side]
    if readout.source == residual_hook(0):  # some read their keys from the embedded input
        sums = sums * torch.tensor([name == EMBEDDING for name in names], device=sums.device)[:, None, None]
    return torch.cat([readout.vectors(sums), readout.bias_vectors(read.bias[side])[None]])


@torch.no_grad()
def distance_sources_check(
    model: Any,
    tokens: Tokens,
    layer: int,
    *,
    attention_mask: Tensor | None = None,
    distances: Numbers | None = None,
    heads: Heads = None,
    sinks: int = 0,
    top: int = 1,
    progress: bool = True,
) -> pd.DataFrame:
    """Remove the largest sources of a layer's distance profiles and measure what remains of the profiles.

    ``distance_sources`` says which share of a profile goes with a source if all else stays. Here the model runs without
    it, in two ways. *Direct*: what the source has added is subtracted from the stream before the layer, token by token,
    so that only the layer's norms see the difference. *Total*: the source is set to zero where it acts (``hook_z`` of a
    head, ``hook_mlp_out``), so that later layers change too. A mean ablation would be no test, because the profile is
    made of means, which it keeps.

    Args:
        model, tokens, layer, attention_mask, distances, heads, sinks: as in ``distance_sources``.
        top: sources per head, those with the largest absolute share.
        progress: show a bar.

    Returns:
        One row per head and source, the largest share first: ``layer``, ``head``, ``source``, ``share`` of all pairs in
        which it takes part, and what remains of the profile: ``predicted`` (1 − share), ``direct`` and ``total``, the
        slope of the regression of the new profile on the old one over the distances (1: as before, 0: nothing is
        left, negative: reversed). ``total`` is NaN for the embedding and for biases.

    Raises:
        ValueError: what ``distance_sources`` refuses; ``top`` that is no positive integer.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.experiments import distance_sources_check
        >>> table = distance_sources_check(load_demo_model(), demo_tokens(length=96), 1, heads=[3], progress=False)
        >>> table["source"].tolist(), bool((table["direct"] - table["predicted"]).abs().max() < 0.5)
        (['L0 MLP'], True)
    """
    check_integer("top", top, 1)
    reading = read_model(model, [layer])
    model, (spec,) = reading.model, reading.rotary([layer], "distance_sources")
    texts = read_texts(model, tokens, attention_mask)
    found = distance_sources(
        reading, tokens, layer, attention_mask=attention_mask, distances=distances, heads=heads, sinks=sinks
    )
    table = found.to_frame("source")
    table = table[table["source"] != BIAS].groupby("head", sort=False).head(top).drop(columns="error")
    place = {head: at for at, head in enumerate(found.heads)}
    remaining: dict[str, list[list[float]]] = {}
    for source in tqdm(list(dict.fromkeys(table["source"])), desc="sources", disable=not progress):
        ways = partial(_subtraction, model, spec.layer, source), partial(_ablation, model, source)
        remaining[source] = [_slopes(model, spec, texts, found, sinks, hooks) for hooks in ways]
    rows = list(zip(table["source"], table["head"], strict=True))
    table = table.assign(predicted=1 - table["share"])
    for number, column in enumerate(("direct", "total")):
        table[column] = [remaining[source][number][place[head]] for source, head in rows]
    return table.reset_index(drop=True)


def _slopes(
    model: Any,
    spec: AttentionSpec,
    texts: Texts,
    found: DistanceSources,
    sinks: int,
    hooks_for: Callable[[Tensor], list[Hook] | None],
) -> list[float]:
    """What remains of each head's profile under hooks, made for the tokens of each group; NaN where there are none."""
    heads, keys = list(found.heads), [spec.key_head(head) for head in found.heads]
    count = sum(length - sinks for length in texts.lengths)
    query = key = torch.zeros(())
    for group in texts.groups:
        hooks = hooks_for(group.tokens)
        if hooks is None:
            return [float("nan")] * len(heads)
        captured: list[Captured] = []
        with applied(model, hooks):
            for_each_layer(model, group.tokens, [spec], captured.append, scores=False)
        query = query + captured[0].q[:, sinks:, heads].double().sum((0, 1)) / count
        key = key + captured[0].k[:, sinks:, keys].double().sum((0, 1)) / count
    old, new = (x - x.mean(-1, keepdim=True) for x in (found.profile(), found.profile_of(query, key)))
    return share_of((old * new).sum(-1), old.square().sum(-1)).tolist()


def _subtraction(model: Any, layer: int, source: str, tokens: Tensor) -> list[Hook]:
    """Subtract what a source has added from the stream before a layer."""
    part = tokens_of_source(model, tokens, source)
    return [(residual_hook(layer), lambda x, hook: x - part.to(x))]


def _ablation(model: Any, source: str, tokens: Tensor) -> list[Hook] | None:
    """Set a source to zero where it acts; None for the embedding and biases."""
    layer, head, part = (0, None, None) if source == EMBEDDING else parse_source(source)
    if head is not None:
        return ablate_heads(model, [(layer, head)])
    return [(f"blocks.{layer}.hook_mlp_out", lambda x, hook: torch.zeros_like(x))] if part == "MLP" else None
