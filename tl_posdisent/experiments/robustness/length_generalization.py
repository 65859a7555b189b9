"""Loss and attention in texts beyond the training length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from math import nan
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.token_losses import as_log_probabilities, token_losses
from tl_posdisent.hooks.applied import applied, check_hooks
from tl_posdisent.hooks.hook_list import Heads, any_heads
from tl_posdisent.models.capture import of_heads
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, output_of, running
from tl_posdisent.models.running.texts import Texts, TokenIds, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice, is_integer, shown


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
_INDEX = ["start", "stop", "layer", "head"]
_MEASURES = ["entropy", "largest_score", "share_key"]


def length_generalization(
    model: Any,
    tokens: Tokens,
    lengths: Sequence[int],
    hooks: Sequence[Hook] | None = None,
    *,
    attention_mask: Tensor | None = None,
    ignore: TokenIds | None = None,
    by: RowsPer = "bucket",
    layers: Layers = None,
    heads: Heads = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure loss and attention by position, in texts that may be longer than those of the training.

    For texts beyond the model's context load it with a larger ``n_ctx``.

    Args:
        model, attention_mask: as in ``head_ablation``.
        ignore: as in ``head_ablation``, in the loss alone.
        tokens: as in ``head_ablation``; every text must have at least as many tokens as the last of ``lengths``.
        lengths: edges of the buckets, ascending: bucket n holds the queries ``lengths[n] … lengths[n + 1] - 1``.
            Positions before the first edge and after the last are not counted.
        hooks: an intervention, such as ``lambda_mask`` or ``position_interpolation``. Default none.
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
        * ``share_key``: the share of the variance of the bucket's scores that the key alone explains.

        ``largest_score`` and ``share_key`` are NaN in a layer without a hook for its scores. In a layer that would not
        use edited scores, ``entropy`` is NaN under hooks, too.

    Raises:
        ValueError: invalid arguments; a model that cannot run texts of this length, or rotates, scales or masks them in
            another way than short ones; a layer without ``hook_pattern``; logits that are not finite.

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
    check_choice("by", by, get_args(RowsPer))
    batch = read_texts(model, tokens, attention_mask, ignore)
    edges = _check_lengths(lengths, min(batch.lengths), getattr(model.cfg, "n_ctx", None))
    for spec, _ in chosen:
        spec.check_length(edges[-1], "length_generalization")
        if spec.taps.pattern is None:
            raise ValueError(f"layer {spec.layer} of {spec.architecture} has no hook_pattern")
    read = torch.stack([text[: edges[-1]] for text in batch.unpadded()])
    checked_hooks = [] if hooks is None else check_hooks(model, hooks)
    found = dict[tuple[int, str], list[float]]()
    with tqdm(total=len(chosen), desc="layers", disable=not progress) as bar:
        # Elsewhere hooks do not show the scores that the layer uses.
        shown = [(spec, of_layer) for spec, of_layer in chosen if spec.taps.scores or not checked_hooks]
        observers = [hook for spec, of_layer in shown for hook in _observers(spec, of_layer, edges, found, bar)]
        with torch.no_grad(), running(model), applied(model, [*checked_hooks, *observers]):
            logits = output_of(model, read)
    losses = _losses(logits, batch, edges)
    tables = []
    for spec, of_layer in chosen:
        rows = product(pairwise(edges), of_layer)
        table = pd.DataFrame([(start, stop, spec.layer, head) for (start, stop), head in rows], columns=_INDEX)
        tables.append(table.assign(**{name: found.get((spec.layer, name), nan) for name in _MEASURES}))
    index = _INDEX[: {"bucket": 2, "layer": 3, "head": 4}[by]]
    table = pd.concat(tables)[[*index, *_MEASURES]].groupby(index).mean().reset_index()
    table.insert(len(index), "loss", table["start"].map(losses))
    return reading.note(table)


def _losses(logits: Tensor, batch: Texts, edges: Sequence[int]) -> dict[int, float]:
    """Return the mean loss of each bucket, by its start."""
    by_token, counts = list[Tensor](), list[Tensor]()
    for x, ids, real, counted in zip(logits, batch.tokens, batch.real, batch.counted, strict=True):  # logits are large
        by_token += token_losses(as_log_probabilities(x[None]), ids[real][None, : len(x) + 1])
        counts.append(counted[real][: len(by_token[-1])].to(x.device))
    if not all(bool(x.isfinite().all()) for x in by_token):
        raise ValueError("the model's logits are not finite")
    kept = {a: torch.cat([x[a:b][n[a:b]] for x, n in zip(by_token, counts, strict=True)]) for a, b in pairwise(edges)}
    if empty := [a for a, losses in kept.items() if not len(losses)]:
        raise ArgumentError(
            "ignore", f"must leave a prediction that counts in each bucket, got none from {empty[0]} on"
        )
    return {a: float(losses.double().mean()) for a, losses in kept.items()}


def _observers(
    spec: AttentionSpec, heads: list[int], edges: list[int], found: dict[tuple[int, str], list[float]], bar: Any
) -> list[Hook]:
    """Return hooks that measure a layer: values by its number and the measure, bucket by bucket and head by head."""

    def keep(measure: str, by_query: Float64[Tensor, "text head query"]) -> None:
        means = [by_query[..., start:stop].mean((0, 2)) for start, stop in pairwise(edges)]
        found[spec.layer, measure] = torch.cat(means).tolist()

    def see_pattern(pattern: Tensor, hook: Any) -> None:
        keep("entropy", entropy_by_query(of_heads(pattern, heads)))
        bar.update()

    def see_scores(scores: Tensor, hook: Any) -> None:
        scores = of_heads(scores, heads)
        keep("largest_score", largest_by_query(scores, spec))
        shares = [share_key(scores, spec, start, stop).mean(0) for start, stop in pairwise(edges)]
        found[spec.layer, "share_key"] = torch.cat(shares).tolist()

    taps, hooks = spec.taps, list[Hook]()
    for name, see in ((taps.pattern, see_pattern), (taps.scores, see_scores)):
        hooks += [(name, see)] if name else []
    return hooks


def _check_lengths(lengths: Any, length: int, context: Any) -> list[int]:
    is_sequence = isinstance(lengths, Iterable) and not isinstance(lengths, (str, bytes))
    edges = list(lengths) if is_sequence else []
    if not all(map(is_integer, edges)) or len(edges) < 2 or any(b <= a for a, b in pairwise(edges)):
        raise ArgumentError(
            "lengths", f"must be at least two ascending integers, got {edges if is_sequence else shown(lengths)}"
        )
    if edges[0] < 0 or edges[-1] > length or edges[-2] > length - 2:
        cut = ": to_tokens truncates longer texts at the context; pass a string, or to_tokens(text, truncate=False)"
        raise ArgumentError(
            "lengths",
            f"must lie within the text of {length} tokens, with a token to predict in the last bucket, "
            f"got {edges}{cut if length == context < edges[-1] else ''}",
        )
    return [int(edge) for edge in edges]
