"""Sources of a head's distance profile: a sum over the sources of its mean query and of its mean key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Complex128, Float, Float64
from torch import Tensor

from tl_posdisent.experiments.measuring.qk_readout import (
    FrozenReadout,
    Readout,
    freeze,
    measure_readouts,
    observe,
    taps_of,
)
from tl_posdisent.experiments.measuring.stream_sources import BIAS, read_source, stream_sources
from tl_posdisent.hooks.hook_list import Heads
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.rope.factorial_variance_decomposition import share_of
from tl_posdisent.rope.rotary import Rotary, to_complex
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.restoring import without_gradients
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import Numbers, check_choice, check_integer, real_numbers
from tl_posdisent.utils.words import plural

_ROUNDING = 1e-13


@dataclass(frozen=True, eq=False, repr=False)
class DistanceSources(HasTable):
    """The distance profile of heads of one layer as a sum over pairs of sources.

    The profile of a head is its mean score at each distance, over all combinations of queries and keys of the texts:
    ``profile[d] = scale · ⟨R(d) mean query, mean key⟩``, the distance effect of ``controlled_distance`` plus its mean.
    With the scales of all norms frozen, the mean query and the mean key are sums over sources, and the profile is the
    sum of ``term(a, b)[d] = scale · ⟨R(d) query_a, key_b⟩`` over all pairs. All tensors are float64.

    Attributes:
        layer: number of the layer.
        heads: the query heads.
        sources: ``"embedding"`` (the stream before the first block; if it is a sum with embeddings of positions,
            ``"positional embedding"`` as well), ``"L0H3"`` for heads of earlier layers, ``"L0 bias"`` for the bias of
            that layer's attention output, ``"L0 MLP"``, and ``"bias"``: the bias of the layer's own queries and keys,
            and the offset of its norm.
        distances: ``[distance]``, in tokens.
        query, key: ``[source, head, d_head]``, each source's part of the mean query and key before rotation.
        own_query, own_key: ``[head, d_head]``, the means of the model's own queries and keys.
        scale, rotary: scale of the layer's scores, and its rotation.
    """

    layer: int
    heads: tuple[int, ...]
    sources: tuple[str, ...]
    distances: Float64[Tensor, " distance"]
    query: Float64[Tensor, "source head d_head"]
    key: Float64[Tensor, "source head d_head"]
    own_query: Float64[Tensor, "head d_head"]
    own_key: Float64[Tensor, "head d_head"]
    scale: float
    rotary: Rotary

    def profile(self) -> Float64[Tensor, "head distance"]:
        """Compute the controlled profile from the model's own mean queries and keys, in units of the scores."""
        return self.profile_of(self.own_query, self.own_key)

    def total(self) -> Float64[Tensor, "head distance"]:
        """Compute the sum of the terms of all pairs of sources."""
        return self.profile_of(self.query.sum(0), self.key.sum(0))

    def term(self, query_source: str, key_source: str) -> Float64[Tensor, "head distance"]:
        """Compute the term of one source of the query and one source of the key."""
        return self.profile_of(self.query[self._index(query_source)], self.key[self._index(key_source)])

    def profile_of(
        self, query: Float64[Tensor, "row d_head"], key: Float64[Tensor, "row d_head"]
    ) -> Float64[Tensor, "row distance"]:
        """Compute the scores of queries and keys before rotation, row by row, at each of the distances."""
        (q, q_rest), (k, k_rest) = (to_complex(x, self.rotary) for x in (query, key))
        still = self.scale * (q_rest * k_rest).sum(-1, keepdim=True)
        return ((q * k.conj()) @ self._turns().T).real + still

    def error(self) -> Float64[Tensor, " head"]:
        """Largest difference between ``total()`` and ``profile()``, relative to the profile's largest value."""
        profile = self.profile()
        return share_of((self.total() - profile).abs().amax(-1), profile.abs().amax(-1))

    def shares(self) -> Float64[Tensor, "head source source"]:
        """Compute the share of each pair of sources ``[head, source of the query, source of the key]``.

        It is the term's covariance with the profile, divided by the profile's variance, both over the distances. Shares
        of a head sum to 1; terms that cancel others have negative shares. NaN for a profile that does not vary.
        """
        profile, turn = self.total(), self._turns()
        centred = profile - profile.mean(-1, keepdim=True)
        variance = centred.square().mean(-1)
        largest = self.scale * self.rotary.attention_factor**2 * self.own_query.norm(dim=-1) * self.own_key.norm(dim=-1)
        flat = variance.sqrt() <= _ROUNDING * largest.abs()  # an upper bound of the profile
        with_profile = torch.einsum("dc,hd->hc", turn, centred.to(turn.dtype)) / len(self.distances)
        q, k = (to_complex(x, self.rotary)[0] for x in (self.query, self.key))
        products = torch.einsum("ahc,hc,bhc->hab", q, with_profile, k.conj()).real
        return torch.where(flat[:, None, None], torch.nan, products / variance[:, None, None])

    def to_frame(
        self, by: Literal["pair", "query", "key", "source"] = "pair", *, top: int | None = None
    ) -> pd.DataFrame:
        """Return the shares of the profile's variance over the distances, the largest first in each head.

        Args:
            by: ``"pair"`` gives one row per head, source of the query and source of the key; ``"query"`` and ``"key"``
                one per source of that side, summed over the other; ``"source"`` one per source, summed over all pairs
                in which it is on either side.
            top: number of rows per head, those with the largest absolute share; default all.
        """
        check_choice("by", by, ("pair", "query", "key", "source"))
        if top is not None:
            check_integer("top", top, 1)
        pairs = self.shares()
        query, key = pairs.sum(-1), pairs.sum(-2)
        shares = {
            "pair": pairs,
            "query": query,
            "key": key,
            "source": query + key - pairs.diagonal(dim1=-2, dim2=-1),
        }[by]
        names = {"pair": ["query_source", "key_source"], "source": ["source"]}.get(by, [f"{by}_source"])
        index = pd.MultiIndex.from_product([self.heads, *[self.sources] * len(names)], names=["head", *names])
        table = pd.DataFrame({"share": shares.flatten().tolist()}, index=index).reset_index()
        table = table.sort_values("share", key=lambda x: -x.abs(), kind="stable")
        table = table.sort_values("head", key=lambda x: x.map(self.heads.index), kind="stable")
        table["error"] = table["head"].map(dict(zip(self.heads, self.error().tolist(), strict=True)))
        table.insert(0, "layer", self.layer)
        return table.groupby("head", sort=False).head(top or len(table)).reset_index(drop=True)

    def _turns(self) -> Complex128[Tensor, "distance subspace"]:
        angle = self.rotary.angles(self.distances)
        return self.scale * self.rotary.attention_factor**2 * torch.polar(torch.ones_like(angle), angle)

    def _index(self, source: str) -> int:
        check_choice("source", source, self.sources)
        return self.sources.index(source)

    def __repr__(self) -> str:
        table = self.to_frame(top=1).sort_values("share", key=abs, ascending=False).head(3)
        largest = "   ".join(
            f"L{self.layer}H{row.head} {row.query_source} × {row.key_source} {row.share:.2f}"
            for row in table.itertuples()
        )
        return (
            f"DistanceSources of layer {self.layer}: {plural(len(self.heads), 'head')}, "
            f"{plural(len(self.sources), 'source')} of queries "
            f"and keys, {plural(len(self.distances), 'distance')}\n  largest: {largest}"
        )


@without_gradients()
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

    The profile is the mean score at each distance if every query is combined with every key there (see
    ``controlled_distance``). It depends only on the mean query and the mean key. With every norm's scale frozen at its
    value for each token, queries and keys are affine functions of the residual stream, which is the sum of the
    embedding and of the outputs of earlier heads, MLPs and biases. The mean query and the mean key therefore split over
    these sources, and the profile over their pairs. The maps are measured on the model and checked.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``; with rotary embeddings.
        tokens, attention_mask, distances, sinks: as in ``controlled_distance``.
        layer: 0 … n_layers - 1; negative ones count from the end.
        heads: query heads, integers or pairs ``(layer, head)`` of this layer; default all.

    Raises:
        ValueError: invalid arguments; a layer without rotary embeddings; queries or keys that are not such a function
            of the stream (latent attention); a stream that is not the sum of its parts (a norm on the stream itself);
            attention that is not linear in ``hook_z``; texts of lengths at which the model rotates differently.

    Example:
        >>> from tl_posdisent import demo_tokens, distance_sources, load_demo_model
        >>> found = distance_sources(load_demo_model(), demo_tokens(length=128), 1, heads=[3])
        >>> found
        DistanceSources of layer 1: 1 head, 1... sources of queries and keys, 128 distances
          largest: L1H3 L0 MLP × L0 MLP ...
        >>> total = sum(found.term(a, b) for a in found.sources for b in found.sources)
        >>> bool((total - found.profile()).abs().max() < 1e-4)
        True
    """
    reading = read_model(model, [layer])
    model, (spec,) = reading.model, reading.rotary([layer], "distance_sources")
    scale = spec.require_scale()
    chosen = tuple(reading.heads([spec.layer], heads)[spec.layer])
    texts = read_texts(model, tokens, attention_mask)
    check_integer("sinks", sinks, 0, min(texts.lengths) - 1)
    count = sum(length - sinks for length in texts.lengths)
    taps = taps_of(spec, before_norm=True)
    readouts = measure_readouts(model, spec, texts.groups[0].tokens, taps, "distance_sources needs")
    query = _Mean(spec, readouts["q"], list(chosen), sinks, count)
    key = _Mean(spec, readouts["k"], [spec.key_head(head) for head in chosen], sinks, count)
    batches, rotations = [], []
    for group in texts.groups:
        held, seen = observe(model, spec, readouts.values(), group.tokens)
        weights = torch.cat([query.add(held, seen.q), key.add(held, seen.k)], -1)
        batches.append((group.tokens, partial(torch.einsum, "bpw,bp...->w...", weights)))
        rotations.append(seen.spec.require_rotary("distance_sources"))
    first = rotations[0]
    for other in rotations:
        same = torch.equal(first.frequencies, other.frequencies)
        if not same or first.attention_factor != other.attention_factor:
            raise ArgumentError(
                "tokens",
                f"must be texts that layer {spec.layer} of {spec.architecture} rotates by the same frequencies, got "
                "texts of lengths at which these differ: call distance_sources for each length",
            )
    sums = dict(stream_sources(model, batches, spec.layer, "distance_sources"))
    n = len(query.bias)
    of_query = query.parts({name: x[:n] for name, x in sums.items()})
    of_key = key.parts({name: x[n:] for name, x in sums.items()})
    at = real_numbers("distances", range(texts.longest) if distances is None else distances, of_key.device)
    parts, rotary = (of_query, of_key, query.own, key.own), first.to(of_key.device)
    return DistanceSources(spec.layer, chosen, (*sums, BIAS), at, *parts, scale, rotary)


class _Mean:
    """The mean query (or key) of some heads over ``count`` tokens, summed text by text: ``own``, and its parts."""

    def __init__(self, spec: AttentionSpec, readout: Readout, heads: list[int], sinks: int, count: int) -> None:
        self.spec, self.readout, self.heads, self.sinks, self.count = spec, readout, heads, sinks, count
        self.frozen: FrozenReadout | None = None  # in the first texts
        self.bias = self.own = torch.zeros((), dtype=torch.float64, device="cpu")

    def add(
        self, held: dict[str, Tensor], vectors: Float[Tensor, "batch pos head d_head"]
    ) -> Float64[Tensor, "batch pos weight"]:
        """Add texts to the mean; return their tokens' weights, one per token or, with a QK-norm, one per head."""
        norm = None if self.frozen is None else self.frozen.norm
        frozen = freeze(self.spec, self.readout, self.heads, held, vectors, norm)
        self.frozen = self.frozen or frozen
        weights = frozen.stream_scale / self.count
        weights[:, : self.sinks] = 0
        self.bias = self.bias + frozen.own_scale[:, self.sinks :].sum((0, 1)) / self.count
        self.own = self.own + vectors[:, self.sinks :, self.heads].double().sum((0, 1)) / self.count
        return weights

    def parts(self, sums: Mapping[str, Float64[Tensor, "weight d_model"]]) -> Float64[Tensor, "source head d_head"]:
        """Compute the mean query or key of each source, and of the bias."""
        assert self.frozen
        parts = [read_source(self.frozen, name, x) for name, x in sums.items()]
        return torch.stack([*parts, self.frozen.constant(self.bias)])
