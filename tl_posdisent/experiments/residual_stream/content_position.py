"""Content and position in the residual stream: their terms in a layer's scores, and the positional subspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.experiments.residual_stream.qk_readout import (
    Readout,
    measure_readouts,
    query_key_taps,
    residual_hook,
)
from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.capture import for_each_scores
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Recorded, running
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import score_tolerance
from tl_posdisent.utils.tables import HasTable, index_columns
from tl_posdisent.utils.validation import check_choice, check_integer
from tl_posdisent.utils.words import plural

Source = Literal["content", "position", "bias"]
SOURCES: tuple[Source, ...] = get_args(Source)
TERMS = (*(f"{query}:{key}" for query in SOURCES for key in SOURCES), "attention bias")
"""Names of the terms: source of the query and source of the key, and the bias added to the scores (ALiBi, T5)."""


@dataclass(frozen=True, eq=False, repr=False)
class ContentPosition(HasTable):
    """The scores of a layer as a sum of ten terms: nine products of parts of queries and keys, and a bias.

    All tensors are float64.

    Attributes:
        layer: number of the layer.
        query, key: ``[source, batch, pos, head, d_head]``, the parts in the order of ``SOURCES`` (content, position,
            bias), scale and rotation included; one key head per query head.
        attention_bias: ``[head, query, key]``, added to the products (ALiBi, T5); 0 outside the mask.
        position: ``[pos, d_model]``, the positional part of the residual stream that queries read.
        mask: ``[query, key]``, where a query sees a key; ``[batch, query, key]`` for texts of unequal length, whose
            parts are 0 after their end.
    """

    layer: int
    query: Float64[Tensor, "source batch pos head d_head"]
    key: Float64[Tensor, "source batch pos head d_head"]
    attention_bias: Float64[Tensor, "head query key"]
    position: Float64[Tensor, "pos d_model"]
    mask: Bool[Tensor, "*batch query key"]

    def term(self, name: str) -> Float64[Tensor, "batch head query key"]:
        """Return one of ``TERMS`` at every cell, in the shape of the scores; 0 outside the mask."""
        check_choice("name", name, TERMS)
        if name == TERMS[-1]:
            return torch.where(self._mask, self.attention_bias.expand(self.query.shape[1], -1, -1, -1), 0.0)
        query, key = (SOURCES.index(source) for source in name.split(":"))
        return self._product(self.query[query], self.key[key])

    def scores(self) -> Float64[Tensor, "batch head query key"]:
        """Return the sum of all terms: the layer's scores before any soft cap, 0 outside the mask."""
        return self._product(self.query.sum(0), self.key.sum(0)) + self.term(TERMS[-1])

    def to_frame(self) -> pd.DataFrame:
        """Return one row per head and term, over the cells of all texts.

        ``share`` is the covariance of the term with the scores, divided by the variance of the scores: shares sum to 1.
        ``size`` is the term's own variance divided by that of the scores. ``toeplitz`` is the share of the term's own
        variance that is a function of the distance, the same for all texts (``AdditiveFit.share_distance``); NaN for a
        term that does not vary.
        """
        scores = self._centred(self.scores())
        total, tables = scores.square().mean((0, 2)), []
        heads = index_columns(total.shape)
        for name in TERMS:
            term = self.term(name)
            centred = self._centred(term)
            columns = {
                "share": (centred * scores).mean((0, 2)) / total,
                "size": centred.square().mean((0, 2)) / total,
                "toeplitz": fit_additive(term, mask=self._mask, pool=True, check=False).share_distance,
            }
            tables.append(pd.DataFrame({**heads, "term": name, **{key: x.tolist() for key, x in columns.items()}}))
        return pd.concat(tables, ignore_index=True).sort_values("head", kind="stable", ignore_index=True)

    def _product(self, query: Tensor, key: Tensor) -> Float64[Tensor, "batch head query key"]:
        return torch.where(self._mask, torch.einsum("bqhd,bkhd->bhqk", query, key), 0.0)

    @property
    def _mask(self) -> Bool[Tensor, "*batch_head query key"]:
        return self.mask[:, None] if self.mask.ndim == 3 else self.mask

    def _centred(self, x: Tensor) -> Float64[Tensor, "batch head cell"]:
        """Return the cells inside the mask minus the mean of all texts; one batch entry for texts of unequal length."""
        cells = x[..., self.mask] if self.mask.ndim == 2 else x.transpose(0, 1)[:, self.mask][None]
        return cells - cells.mean((0, 2), keepdim=True)

    def __repr__(self) -> str:
        texts, length, heads = self.query.shape[1:4]
        size = f"{plural(texts, 'text')} of {plural(length, 'token')}"
        return f"ContentPosition of layer {self.layer}: {plural(heads, 'head')}, {size}"


def content_position_terms(
    model: Any,
    tokens: Tokens,
    layer: int,
    *,
    attention_mask: Tensor | None = None,
    grand_mean: Literal["content", "bias"] = "content",
) -> ContentPosition:
    """Split a layer's scores into terms of the positional and content parts of the residual stream (arXiv 2505.13027).

    The positional part of the stream is its mean over the texts at each position minus its mean over all tokens; the
    content part is the remainder. With M the map from stream to query at the norm's actual scale s, a query is
    ``s·M content + s·M position + bias``. Keys split in the same way, and a score is the sum of nine products and of
    the bias that the layer adds (ALiBi, T5). The map is measured, and the sum of the parts is checked against the
    model's own scores. With T texts, 1/T of the content's variance at each position is counted as position: use many
    different texts.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``; with a norm before its
            attention.
        tokens: ids ``[batch, pos]``, or a list of texts of any lengths: at least two different texts at every
            position.
        layer: 0 … n_layers - 1; negative numbers count from the end.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Texts are run without padding.
        grand_mean: part that contains the mean of the whole stream: ``"content"`` as in the paper, or ``"bias"``.

    Raises:
        ValueError: invalid arguments; positions that only one text reaches; queries or keys that are not an affine
            function of the stream (QK-norm, post-norm); soft-capped scores; a bias of the scores that
            depends on the text.

    Example:
        >>> from tl_posdisent.experiments import content_position_terms
        >>> from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel
        >>> import torch
        >>> sizes = {"n_layers": 1, "d_model": 32, "n_heads": 2, "d_mlp": 32, "d_vocab": 20, "n_ctx": 16, "n_out": 3}
        >>> tokens = torch.randint(1, 20, (8, 16), generator=torch.Generator().manual_seed(0))
        >>> model = SyntheticModel(SyntheticConfig(encoding="alibi", **sizes))
        >>> terms = content_position_terms(model, tokens, 0)
        >>> terms, terms.term("position:position").shape
        (ContentPosition of layer 0: 2 heads, 8 texts of 16 tokens, torch.Size([8, 2, 16, 16]))
        >>> bool(terms.to_frame().groupby("head")["share"].sum().round(6).eq(1).all())
        True
    """
    reading = read_model(model)
    model, (spec,) = reading.model, reading.specs([layer])
    layer = spec.layer
    texts = read_texts(model, tokens, attention_mask)
    check_choice("grand_mean", grand_mean, ("content", "bias"))
    texts.require_two("content_position_terms")
    ids = texts.from_the_start([group.tokens for group in texts.groups], -1)
    if bool(((ids == ids.amax(0)) | (ids < 0)).all()):
        raise ArgumentError("tokens", f"must be at least two different texts, got {len(ids)} equal ones")
    if spec.soft_cap is not None:
        raise ValueError(f"layer {layer} of {spec.architecture} soft-caps its scores, so they are not sums of products")
    taps = query_key_taps(spec, before_norm=False)
    readouts = measure_readouts(model, spec, texts.groups[0].tokens, taps, "content and position need").values()
    names = [name for readout in readouts for name in (readout.source, *readout.tap.names)]
    seen: list[dict[str, Tensor]] = []
    scores_by_group: list[Tensor] = []
    squares: list[tuple[Tensor, ...]] = []  # scores and mask, with queries and keys zero-padded to the longest text
    for group in texts.groups:
        held = Recorded()
        with applied(model, held.hooks(dict.fromkeys(names))):
            for_each_scores(model, group.tokens, [spec], lambda _, x: scores_by_group.append(x))
        missing = texts.longest - group.tokens.shape[1]
        inside = spec.mask(group.tokens.shape[1], group.tokens.device).expand(len(group.tokens), -1, -1)
        seen.append(held)
        squares.append(
            tuple(torch.nn.functional.pad(x, (0, missing, 0, missing)) for x in (scores_by_group[-1], inside))
        )
    scores = texts.from_the_start([x.transpose(1, 2) for x, _ in squares]).transpose(1, 2)
    mask = texts.from_the_start([x for _, x in squares])
    (query, position), (key, _) = (_parts(spec, readout, seen, texts, grand_mean) for readout in readouts)
    products = torch.einsum("bqhd,bkhd->bhqk", query.sum(0), key.sum(0))
    scale, attention_bias = _explained(spec, products, scores, mask)
    return ContentPosition(layer, query * scale, key, attention_bias, position, mask[0] if len(seen) == 1 else mask)


def split_stream(
    streams: Sequence[Float64[Tensor, "_text _pos d_model"]],
) -> tuple[list[Tensor], Float64[Tensor, "pos d_model"], Float64[Tensor, " d_model"], Float64[Tensor, " pos"]]:
    """Split residual streams into content (without the grand mean), position and grand mean, which add up to them.

    Each of ``streams`` belongs to texts of equal length. The number of texts at each position is returned, too.
    """
    longest = max(x.shape[1] for x in streams)
    total, counts = streams[0].new_zeros(longest, streams[0].shape[2]), streams[0].new_zeros(longest)
    for x in streams:
        total[: x.shape[1]] += x.sum(0)
        counts[: x.shape[1]] += len(x)
    at_position, mean = total / counts[:, None], total.sum(0) / counts.sum()
    if not bool(mean.isfinite().all()):
        raise ValueError("the residual stream must be finite, got NaN or infinite values: check the model's weights")
    return [x - at_position[: x.shape[1]] for x in streams], at_position - mean, mean, counts


def _parts(
    spec: AttentionSpec, readout: Readout, seen: Sequence[dict[str, Tensor]], texts: Texts, grand_mean: str
) -> tuple[Float64[Tensor, "source batch pos head d_head"], Float64[Tensor, "pos d_model"]]:
    """Compute queries or keys by source, rotated if the layer rotates, and the positional part of their input."""
    streams = [held[readout.source].double() for held in seen]
    content, position, mean, _ = split_stream(streams)
    by_group = []
    for held, stream, stream_content in zip(seen, streams, content, strict=True):
        scale = readout.scales(spec, stream, readout.tap.read(*(held[name] for name in readout.tap.names)))
        parts = [scale * readout.linear(x) for x in (stream_content, position[: stream.shape[1]].expand_as(stream))]
        constant = scale * readout.linear(mean)
        bias = readout.bias.expand_as(constant)
        parts = [parts[0] + constant, parts[1], bias] if grand_mean == "content" else [*parts, constant + bias]
        places = torch.arange(stream.shape[1], device=stream.device)
        by_group.append(torch.stack([spec.per_query_head(spec.rotated(part, places)) for part in parts], 2))
    return texts.from_the_start(by_group).movedim(2, 0), position


def _explained(
    spec: AttentionSpec, products: Tensor, scores: Tensor, mask: Bool[Tensor, "batch query key"]
) -> tuple[float, Float64[Tensor, "head query key"]]:
    """Find the scale, from the changes of scores between texts, and the added bias; raise if that differs by text."""
    inside, texts = mask[:, None], mask.sum(0).clamp_min(1)
    products, seen = (torch.where(inside, x.double(), 0.0) for x in (products, scores))
    moves = torch.where(inside, products - products.sum(0) / texts, 0.0)
    scale = spec.scale if spec.scale is not None else float((moves * seen).sum() / moves.square().sum())
    added = seen - scale * products
    bias = added.sum(0) / texts
    error = torch.where(inside, added - bias, 0.0).abs().amax()
    allowed = score_tolerance(scores.dtype) * seen.abs().amax()
    if not bool(error <= allowed):
        raise ValueError(
            f"the parts of queries and keys must add up to the scores, but in layer {spec.layer} of "
            f"{spec.architecture} they differ from the scores by {error.item():.1e}, where {allowed.item():.1e} would "
            "be rounding" + (f": {spec.limits.problem}" if spec.limits.problem else "")
        )
    if bool(bias.abs().amax() <= allowed):
        bias = torch.zeros_like(bias)  # rounding
    return scale, bias


@dataclass(frozen=True, eq=False, repr=False)
class PositionalSubspace:
    """Positional subspace of the residual stream before a layer. All tensors are float64.

    Attributes:
        layer: number of the layer.
        basis: ``[d_model, rank]``, orthonormal columns, in order of descending variance.
        variances: ``[min(pos, d_model)]``, variances of the positional part along its principal directions, descending.
        share: the positional part's share of the variance of the residual stream.
        noise: the share expected for this number of texts if vectors did not depend on position.
    """

    layer: int
    basis: Float64[Tensor, "d_model rank"]
    variances: Float64[Tensor, " direction"]
    share: float
    noise: float

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return self.basis.shape[1]

    def __repr__(self) -> str:
        return (
            f"PositionalSubspace of layer {self.layer}: {self.rank} of {len(self.basis)} dimensions, "
            f"{self.share:.3f} of the stream is positional ({self.noise:.3f} by chance)"
        )


def positional_subspace(
    model: Any,
    tokens: Tokens,
    layer: int,
    *,
    attention_mask: Tensor | None = None,
    rank: int | None = None,
    sinks: int = 0,
) -> PositionalSubspace:
    """Compute the principal directions of the positional part of the residual stream before a layer.

    The positional part is the mean over the texts at each position minus the mean of all tokens (arXiv 2505.13027). To
    compare two layers, use ``scipy.linalg.subspace_angles`` of their bases.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        tokens: ids ``[batch, pos]``, or a list of texts of any lengths: at least two at every position. Means and
            variances are over tokens, so that a position is weighted by the number of texts that reach it.
        layer: 0 … n_layers - 1; negative numbers count from the end.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Texts are run without padding.
        rank: number of directions; None for the smallest number that explains 95 % of the positional part's variance.
        sinks: number of first positions to leave out.

    Raises:
        ValueError: invalid arguments; positions that only one text reaches; a ``rank`` larger than the number of
            directions in which the positional part varies.

    Example:
        >>> from scipy.linalg import subspace_angles
        >>> from tl_posdisent import cut_text, demo_text, load_demo_model
        >>> from tl_posdisent.experiments import positional_subspace
        >>> model = load_demo_model()
        >>> tokens = cut_text(model, demo_text(), length=32, texts=16)
        >>> first, last = (positional_subspace(model, tokens, layer, rank=2) for layer in (1, 4))
        >>> first
        PositionalSubspace of layer 1: 2 of 128 dimensions, 0.256 of the stream is positional (0.048 by chance)
        >>> subspace_angles(first.basis.numpy(), last.basis.numpy()).shape  # in radians, the largest first
        (2,)
    """
    reading = read_model(model)
    model, (spec,) = reading.model, reading.specs([layer])
    layer = spec.layer
    texts = read_texts(model, tokens, attention_mask)
    if rank is not None:
        check_integer("rank", rank, 1)
    texts.require_two("positional_subspace")
    check_integer("sinks", sinks, 0, min(texts.lengths) - 2)
    streams = []
    for group in texts.groups:
        with running(model) as p:
            seen = p.record(group.tokens, [residual_hook(layer)], stop=layer + 1)
        streams.append(seen[residual_hook(layer)][:, sinks:].double())
    content, position, _, counts = split_stream(streams)
    n = int(counts.sum())
    _, singular, directions = torch.linalg.svd(position * (counts / n).sqrt()[:, None], full_matrices=False)
    variances = singular.square()
    size = (sum(x.square().sum() for x in streams) / n) ** 0.5
    varying = int((singular > 1e-6 * size).sum())
    if not varying:
        raise ArgumentError(
            "tokens",
            f"must be texts whose residual stream before layer {layer} depends on the position, got texts in "
            "which it differs only by rounding",
        )
    if rank is None:
        so_far = variances.cumsum(0) / variances.sum()
        rank = min(int((so_far < 0.95).sum()) + 1, varying)
    if not 1 <= rank <= varying:
        raise ArgumentError(
            "rank", f"must be at least 1 and at most {varying}, the directions with variance, got {rank}"
        )
    within, between = sum(part.square().sum() for part in content) / n, variances.sum()
    chance = within / (n - len(position)) * (len(position) - 1)  # one-way analysis of variance
    total = within + between
    return PositionalSubspace(layer, directions[:rank].T, variances, float(between / total), float(chance / total))
