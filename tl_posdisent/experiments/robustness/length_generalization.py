"""Loss and attention in texts beyond the training length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Float64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.token_losses import as_log_probabilities, token_losses
from tl_posdisent.experiments.robustness.attention_outputs import for_each_output, require_finite
from tl_posdisent.experiments.robustness.mahalanobis import ReferenceSample, fit_reference
from tl_posdisent.hooks.applied import applied, check_hooks
from tl_posdisent.hooks.hook_list import Heads, any_heads
from tl_posdisent.models.capture import of_heads
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, output_of, running
from tl_posdisent.models.running.results import at_results
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice, check_integer, is_integer, shown


def entropy_by_query(pattern: Float[Tensor, "batch head query key"]) -> Float64[Tensor, "batch head query"]:
    """Compute the entropy of each query's attention, in nats."""
    by_head = [torch.special.entr(x.float()).sum(-1, dtype=torch.float64) for x in pattern.unbind(1)]
    return torch.stack(by_head, 1)


def largest_by_query(
    scores: Float[Tensor, "batch head query key"], spec: AttentionSpec
) -> Float64[Tensor, "batch head query"]:
    """Find each query's largest score among the keys that it sees."""
    by_head = [x.masked_fill(~_seen(x, spec), -torch.inf).amax(-1).double() for x in scores.unbind(1)]
    return torch.stack(by_head, 1)


def share_key(
    scores: Float[Tensor, "batch head query key"], spec: AttentionSpec, start: int = 0, stop: int | None = None
) -> Float64[Tensor, "batch head"]:
    """Compute the share of the variance of some queries' scores that the key alone explains.

    It is the variance of each key's mean over queries, weighted by the number of queries that see the key:
    ``AdditiveFit.share_key`` of these rows, also where an intervention hides keys. NaN where the scores do not vary.
    """
    shares = []
    for x in scores[:, :, start:stop].unbind(1):
        seen = _seen(x, spec, start)
        x, count = torch.where(seen, x.double(), 0.0), seen.sum(-2)
        size, cells = x.abs().amax((-2, -1)), count.sum(-1)
        x = torch.where(seen, x - (x.sum((-2, -1)) / cells)[:, None, None], 0.0)
        variation = x.square().sum((-2, -1))
        explained = (x.sum(-2) ** 2 / count.clamp_min(1)).sum(-1)
        varies = variation > 1e-24 * cells * size**2
        shares.append(torch.where(varies, (explained / variation).clamp(0, 1), torch.nan))
    return torch.stack(shares, 1)


def _seen(
    scores: Float[Tensor, "batch query key"], spec: AttentionSpec, start: int = 0
) -> Bool[Tensor, "batch query key"]:
    """Return where queries from ``start`` on see a key: inside the layer's mask, and not hidden by a hook."""
    position = torch.arange(scores.shape[-1], device=scores.device)
    queries = position[start : start + scores.shape[-2], None]
    return spec.sees(queries - position) & ~spec.is_masked(scores)


RowsPer = Literal["bucket", "layer", "head"]
_OUTSIDE_QUANTILE = 0.99
_MEASURES = ["entropy", "largest_score", "share_key", "mahalanobis", "cosine", "outside"]


def length_generalization(
    model: Any,
    tokens: Tokens,
    lengths: Sequence[int],
    hooks: Sequence[Hook] | None = None,
    *,
    attention_mask: Tensor | None = None,
    in_range: int | None = None,
    by: RowsPer = "bucket",
    layers: Layers = None,
    heads: Heads = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure loss, attention and attention outputs by position, in texts that may be longer than the model's context.

    For texts beyond the model's context load it with a larger ``n_ctx``. The reference of each head's ``z`` is its
    sample at positions ``lengths[0] … in_range - 1`` of the same texts, from a separate pass that ends there, without
    ``hooks``. Its covariance is shrunk (Ledoit and Wolf). A position in the reference is compared with the reference
    without that position.

    Args:
        model, attention_mask: as in ``head_ablation``.
        tokens: as in ``head_ablation``; every text must have at least as many tokens as the last of ``lengths``.
        lengths: edges of the buckets, ascending: bucket n holds the queries ``lengths[n] … lengths[n + 1] - 1``.
            Positions before the first edge and after the last are not counted.
        hooks: an intervention, such as ``lambda_mask`` or ``position_interpolation``. Default none.
        in_range: end of the reference, usually the length of the training texts; default ``lengths[1]``.
        by: one row per bucket (mean over layers and heads), per bucket and layer, or per bucket, layer and head.
        layers: default all.
        heads: query heads, as in ``head_ablation``; default all. Means over heads are over these.
        progress: show a progress bar over the layers.

    Returns:
        Columns ``start`` and ``stop``; ``layer`` and ``head`` depending on ``by``; then, as means over queries and
        texts,

        * ``loss``: cross-entropy of the next token in nats (of the bucket, the same in all its rows);
        * ``entropy``: entropy of the attention, in nats;
        * ``largest_score``: the largest score of a query with any key that it sees;
        * ``share_key``: the share of the variance of the bucket's scores that the key alone explains;
        * ``mahalanobis``: Mahalanobis distance of z from the reference, divided by √d_head: about 1 in range;
        * ``cosine``: cosine of z with the mean of the reference;
        * ``outside``: share of positions further from the reference than 99 % of its own: 0.01 in range.

        ``largest_score`` and ``share_key`` are NaN in a layer without a hook for its scores. In a layer that would not
        use edited scores, ``entropy`` is NaN under hooks, too.

    Raises:
        ValueError: invalid arguments; a model that cannot run texts of this length, or rotates, scales or masks them in
            another way than short ones; a layer without ``hook_z`` or
            ``hook_pattern``; attention outputs that are not finite.

    Example:
        >>> from tl_posdisent import demo_tokens, lambda_mask, length_generalization, load_demo_model
        >>> model = load_demo_model(n_ctx=1088)  # trained on 512 positions
        >>> tokens, edges = demo_tokens(length=1088), [256, 512, 1024, 1088]
        >>> plain = length_generalization(model, tokens, edges, layers=[4], progress=False)
        >>> plain[["start", "stop"]].values.tolist()
        [[256, 512], [512, 1024], [1024, 1088]]
        >>> hooks = lambda_mask(model, 4, 256, 256)
        >>> kept = length_generalization(model, tokens, edges, hooks, layers=[4], progress=False)
        >>> bool(plain["loss"][2] > plain["loss"][0] + 0.5), bool(kept["loss"][2] < plain["loss"][2] - 0.5)
        (True, True)
    """
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    specs, by_layer = [spec for spec, _ in chosen], {spec.layer: of_layer for spec, of_layer in chosen}
    check_choice("by", by, get_args(RowsPer))
    batch = read_texts(model, tokens, attention_mask)
    edges = _check_lengths(lengths, min(batch.lengths), getattr(model.cfg, "n_ctx", None))
    end = check_integer("in_range", edges[1] if in_range is None else in_range, edges[0] + 3, edges[-1])
    for spec in specs:
        spec.check_length(edges[-1], "length_generalization")
        if spec.taps.z is None or spec.taps.pattern is None:
            raise ValueError(f"layer {spec.layer} of {spec.architecture} has no hook_z or no hook_pattern")
    texts = batch.unpadded()
    read = torch.stack([text[: edges[-1]] for text in texts])
    values: list[Values] = []
    references: dict[int, ReferenceSample] = {}
    with torch.no_grad():
        checked_hooks = [] if hooks is None else check_hooks(model, hooks)
        for_each_output(model, read[:, :end], specs, partial(_fit_reference, references, by_layer, edges[0]))
        with tqdm(total=len(specs), desc="layers", disable=not progress) as bar:
            observers: list[Hook] = []
            for spec, of_layer in chosen:
                layer = _Layer(spec, of_layer, edges, references[spec.layer])
                observers += _observers(layer, values, bar, edited=bool(checked_hooks))
            with running(model), applied(model, [*checked_hooks, *observers]):
                logits = output_of(model, read)
    index = ["start", "stop", *{"bucket": [], "layer": ["layer"], "head": ["layer", "head"]}[by]]
    columns = ["start", "stop", "layer", "measure", "head", "value"]
    measured = pd.DataFrame(values, columns=columns).pivot_table("value", ["start", "stop", "layer", "head"], "measure")
    table = measured.reindex(columns=_MEASURES).groupby(level=index).mean().reset_index()
    pairs = zip(logits, texts, strict=True)  # text by text, because logits are large
    by_token = [token_losses(as_log_probabilities(x[None]), text[None, : len(x) + 1])[0] for x, text in pairs]
    losses = {a: float(torch.cat([x[a:b] for x in by_token]).double().mean()) for a, b in pairwise(edges)}
    table.insert(len(index), "loss", table["start"].map(losses))
    return reading.note(table.rename_axis(columns=None))


def _check_lengths(lengths: Any, length: int, context: Any) -> list[int]:
    is_sequence = isinstance(lengths, Iterable) and not isinstance(lengths, (str, bytes))
    edges = list(lengths) if is_sequence else []
    if not all(map(is_integer, edges)) or len(edges) < 2 or any(b <= a for a, b in pairwise(edges)):
        raise ArgumentError(
            "lengths", f"must be at least two ascending integers, got {edges if is_sequence else shown(lengths)}"
        )
    if edges[0] < 0 or edges[-1] > length or edges[-2] > length - 2 or edges[1] < edges[0] + 3:
        cut = ": to_tokens truncates longer texts at the context; pass a string, or to_tokens(text, truncate=False)"
        raise ArgumentError(
            "lengths",
            f"must lie within the text of {length} tokens, with three positions or more in the first bucket "
            f"and a token to predict in the last, got {edges}{cut if length == context < edges[-1] else ''}",
        )
    return [int(edge) for edge in edges]


Values = tuple[int, int, int, str, int, float]
"""Start and stop of a bucket, layer, measure, head, and the value there."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer that is measured: its heads, the edges of the buckets, and the reference of each head's z."""

    spec: AttentionSpec
    heads: list[int]
    edges: list[int]
    reference: ReferenceSample

    def values(self, measure: str, by_bucket: Sequence[Float[Tensor, " head"]]) -> list[Values]:
        """Return a measure's value for each bucket and head."""
        return [
            (start, stop, self.spec.layer, measure, head, value)
            for (start, stop), of_heads in zip(pairwise(self.edges), by_bucket, strict=True)
            for head, value in zip(self.heads, of_heads.tolist(), strict=True)
        ]

    def of_scores(self, scores: Float[Tensor, "batch head query key"]) -> list[Values]:
        """Measure the largest scores, and the share of their variance that the key explains."""
        scores = of_heads(scores, self.heads)
        shares = [share_key(scores, self.spec, start, stop).mean(0) for start, stop in pairwise(self.edges)]
        largest = self.bucket_means(largest_by_query(scores, self.spec), (0, 2))
        return [*self.values("largest_score", largest), *self.values("share_key", shares)]

    def of_pattern(self, pattern: Float[Tensor, "batch head query key"]) -> list[Values]:
        """Measure the entropy of the attention."""
        return self.values("entropy", self.bucket_means(entropy_by_query(of_heads(pattern, self.heads)), (0, 2)))

    def of_z(self, z: Float[Tensor, "batch pos head d_head"]) -> list[Values]:
        """Compare the attention outputs with the reference."""
        require_finite(z, self.spec.layer)
        z = of_heads(z, self.heads, 2)
        distance, cosine, limit = _drift(
            rearrange(z, "batch pos head d -> head batch pos d"), self.reference, self.edges[0]
        )
        outside = (distance > limit[:, None, None]).double()
        scale = z.shape[-1] ** 0.5
        return [
            *self.values("mahalanobis", [x / scale for x in self.bucket_means(distance, (1, 2))]),
            *self.values("cosine", self.bucket_means(cosine, (1, 2))),
            *self.values("outside", self.bucket_means(outside, (1, 2))),
        ]

    def bucket_means(self, x: Float[Tensor, "_ _ pos"], axes: tuple[int, int]) -> list[Float[Tensor, " head"]]:
        """Average over texts and the positions of each bucket, which are these axes."""
        return [x[..., start:stop].mean(axes) for start, stop in pairwise(self.edges)]


def _fit_reference(
    references: dict[int, ReferenceSample], heads_by_layer: Mapping[int, list[int]], start: int, layer: int, z: Tensor
) -> None:
    """Add a layer's reference: one sample per head, of all texts from ``start`` on, text after text."""
    z = of_heads(z[:, start:], heads_by_layer[layer], 2)
    references[layer] = fit_reference(rearrange(z, "batch pos head d -> head (batch pos) d"))


def _observers(layer: _Layer, values: list[Values], bar: Any, *, edited: bool) -> list[Hook]:
    """Return hooks that add one layer's measures to ``values``; the bar counts layers."""
    spec = layer.spec
    assert spec.taps.pattern
    hooks: list[Hook] = [at_results(spec.layer, spec.n_heads, partial(_observe_z, layer, values, bar))]
    if spec.limits.scores_editable or not edited:  # else the hooks do not show the scores that the layer uses
        hooks.append((spec.taps.pattern, partial(_observe, layer.of_pattern, values)))
        hooks += [(spec.taps.scores, partial(_observe, layer.of_scores, values))] if spec.taps.scores else []
    return hooks


def _observe(measure: Callable[[Tensor], list[Values]], values: list[Values], x: Tensor, hook: Any) -> None:
    values += measure(x)


def _observe_z(layer: _Layer, values: list[Values], bar: Any, z: Tensor) -> None:
    values += layer.of_z(z)
    bar.update()


def _drift(
    z: Float[Tensor, "head batch pos d_head"], reference: ReferenceSample, start: int
) -> tuple[Float[Tensor, "head batch pos"], Float[Tensor, "head batch pos"], Float[Tensor, " head"]]:
    """Compute distance and cosine of each position, and the 99 % quantile of the reference's own distances."""
    batch, n = z.shape[1], reference.sample.shape[1]
    end = start + n // batch
    every = torch.arange(n, device=z.device)
    known = reference.mean[:, None] + reference.sample @ reference.axes.mT
    limit = torch.quantile(reference.distance_without(known, every), _OUTSIDE_QUANTILE, dim=1)
    distance = reference.distance(z.flatten(1, 2)).unflatten(1, (batch, -1))
    cosine = torch.cosine_similarity(z.double(), reference.mean[:, None, None], dim=-1)
    inside = z[:, :, start:end].flatten(1, 2)
    distance[:, :, start:end] = reference.distance_without(inside, every).unflatten(1, (batch, -1))
    return distance, cosine, limit
