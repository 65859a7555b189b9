"""The best additive model of where a head looks: ``softmax_j(d[i - j] + k[j])`` nearest to its attention pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.attention.attention_patterns import (
    Pattern,
    pattern_of_pattern,
    pattern_of_scores,
    pattern_of_vectors,
    refuse_unusable,
)
from tl_posdisent.additive.attention.attention_result import AttentionFit
from tl_posdisent.additive.attention.attention_solver import AIM, Design, Keys, solve_attention
from tl_posdisent.additive.attention.attention_sums import AttentionSums, Layout, Stacked, by_system, to_batch
from tl_posdisent.additive.cells import Cells, MaskKind, make_cells
from tl_posdisent.additive.fit_from_qk import check_vectors
from tl_posdisent.additive.score_checks import check_scores
from tl_posdisent.utils.validation import check_flag, check_number, is_integer

_AT_ONCE = 2**14  # keys of all texts of the systems that are solved together
_AIM_ALONE = 1e-5  # fits of which only the share explained is reported need no more, see ``solve_attention``


@torch.no_grad()
def fit_attention(
    scores: Float[Tensor, "*batch query key"] | None = None,
    *,
    pattern: Float[Tensor, "*batch query key"] | None = None,
    mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
    window: int | None = None,
    bands: Sequence[int] = (),
    keys: Float[Tensor, "*texts key kv feature"] | None = None,
    sink: bool | None = None,
    pool: bool | None = None,
    pseudo_count: float | int = 1e-3,
) -> AttentionFit:
    """Fit ``softmax_j(distance[i - j] + key[j])`` to attention patterns by least Kullback-Leibler divergence.

    ``fit_additive`` fits the scores by least squares, where a softmax may spoil what is left. This fits what the
    softmax makes of them: it minimises ``Σ_i KL(P_i ‖ Q_i)`` over the queries. The problem is convex, and at its
    optimum the total attention of every distance and of every key is that of the data. Sums run in float64.

    Args:
        scores: attention logits before the softmax, ``[*batch, query, key]``, e.g. ``cache["attn_scores", 3]``.
        pattern: instead of scores, attention after the softmax; the rows must add up to 1 within the mask.
        mask, window: as in ``fit_additive``.
        bands: distances at which a new band begins, ascending. Keys have an importance of their own in each band:
            ``bands=(1, 2, 4, 8)`` tells the distances {0}, {1}, {2, 3}, {4 … 7} and {8 …} apart.
        keys: features of the keys ``[*texts, key, kv_head, feature]``, e.g. unrotated key vectors. The importance is
            then ``direction · keys[j]``, a *static* head, which applies to texts that it was not fitted on. Leading
            axes are those of the scores less the last (the heads); head h reads key head ``h // (heads // kv_heads)``.
            With no features at all (``keys[..., :0]``) a head has its distance profile and ``sink`` alone.
        sink: a term of its own for the first key. Default: with ``keys`` only, as free importances contain it.
        pool: one distance profile (and direction) for all entries of the first axis (texts), each with its own keys.
            Default: with ``keys`` and an axis of texts only.
        pseudo_count: this part of the pattern is replaced by uniform attention, which keeps coefficients finite where
            a key or a distance gets none. 0 fits the pattern itself, where that has an optimum.

    Returns:
        An ``AttentionFit``: profile, importances, divergence per query, share explained, ``pattern()``, tables.

    Raises:
        ValueError: neither or both of scores and pattern, or one taken for the other; values that are not finite or
            rows that do not add up to 1 within the mask; bands that do not ascend; ``pseudo_count=0`` where a distance
            or a key gets no attention; keys of another shape; as ``fit_additive`` otherwise.
        RuntimeError: not converged, as with ``pseudo_count=0`` where there is no optimum.

    Example:
        >>> import torch
        >>> from tl_posdisent import fit_attention
        >>> i = torch.arange(6.0)
        >>> scores = -0.5 * (i[:, None] - i) + torch.tensor([3.0, 0, 0, 1, 0, 0])  # a slope and two high keys
        >>> scores = scores + 10 * torch.randn(6, 1)  # of which a softmax sees nothing
        >>> fit = fit_attention(scores, pseudo_count=0)
        >>> round(fit.explained.item(), 6)
        1.0
        >>> pattern = scores.masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf).softmax(-1)
        >>> bool(torch.allclose(fit.pattern(), pattern.double(), atol=1e-5))
        True
    """
    x, kind = _input(scores, pattern)
    pool, sink = _check_options(x.shape, keys, sink, pool)
    pseudo_count, edges = _check_pseudo_count(pseudo_count), _check_bands(bands)
    cells = make_cells(x.shape, mask, window, device=x.device)
    layout = Layout.of(cells, edges, x.shape[:-2], pool=pool, named=isinstance(mask, str))
    features = None if keys is None else _features(keys, x.shape, layout, pool=pool, sink=sink)
    arranged = by_system(x.detach(), 2, pool=pool)
    if kind == "scores":
        refuse_unusable(x, arranged, cells, layout, pool=pool, suspicious=isinstance(mask, str))
    read = (pattern_of_pattern if kind == "pattern" else pattern_of_scores)(arranged, layout)
    data = _Data.read(read, layout, arranged.shape[:2], pseudo_count)
    return _fit(data, features, cells, x.shape[:-2], pool=pool, sink=sink)


@torch.no_grad()
def fit_attention_qk(
    q_rot: Float[Tensor, "*batch query head d_head"],
    k_rot: Float[Tensor, "*batch key kv d_head"],
    *,
    scale: float | int,
    mask: MaskKind = "causal",
    window: int | None = None,
    bands: Sequence[int] = (),
    keys: Float[Tensor, "*texts key kv feature"] | None = None,
    sink: bool | None = None,
    pool: bool | None = None,
    pseudo_count: float | int = 1e-3,
) -> AttentionFit:
    """Fit additive attention to ``softmax(scale · ⟨q_rot[i], k_rot[j]⟩)`` without holding the scores.

    The same fit as of ``fit_attention``, in memory O(length · d_head): the pattern is formed a block at a time, twice.
    Between the two passes, normalisers and marginals are convolutions of the coefficients.

    Args:
        q_rot: rotated queries ``[*batch, query, head, d_head]``, as ``capture`` yields them.
        k_rot: rotated keys ``[*batch, key, kv_head, d_head]``; query head h reads key head ``h // (head // kv_head)``.
        scale: what the inner products are multiplied by, usually ``d_head ** -0.5`` (``AttentionSpec.scale``).
        mask: ``"causal"`` or ``"full"``.
        window, bands, keys, sink, pool, pseudo_count: as in ``fit_attention``.

    Returns:
        An ``AttentionFit`` with leading axes ``*batch head``.

    Raises:
        ValueError: as ``fit_additive_qk`` and ``fit_attention``.
        RuntimeError: as ``fit_attention``.

    Example:
        >>> import torch
        >>> from tl_posdisent import fit_attention
        >>> from tl_posdisent.additive import fit_attention_qk
        >>> q, k = torch.randn(2, 64, 4, 8), torch.randn(2, 64, 2, 8)  # two texts, four heads on two key heads
        >>> scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8**0.5
        >>> fit = fit_attention_qk(q, k, scale=8**-0.5)
        >>> bool(torch.allclose(fit.explained, fit_attention(scores).explained, atol=1e-5))
        True
    """
    check_vectors(q_rot, k_rot, scale, mask, bool(pool))
    q, k = (x.detach().transpose(-3, -2) for x in (q_rot, k_rot))
    shape = (*q.shape[:-1], k.shape[-2])
    pool, sink = _check_options(shape, keys, sink, pool)
    pseudo_count, edges = _check_pseudo_count(pseudo_count), _check_bands(bands)
    cells = make_cells(shape, mask, window, device=q.device)
    layout = Layout.of(cells, edges, shape[:-2], pool=pool, named=True)
    features = None if keys is None else _features(keys, shape, layout, pool=pool, sink=sink)
    q, k = (by_system(x, 2, pool=pool) for x in (q, k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)))
    data = _Data.read(pattern_of_vectors(q, k, scale, layout), layout, q.shape[:2], pseudo_count)
    return _fit(data, features, cells, shape[:-2], pool=pool, sink=sink)


def _input(scores: Any, pattern: Any) -> tuple[Tensor, str]:
    if (scores is None) == (pattern is None):
        raise ValueError("scores or pattern= must be given, and not both")
    return (check_scores(pattern, "pattern"), "pattern") if scores is None else (check_scores(scores), "scores")


def _check_options(shape: Sequence[int], keys: Any, sink: Any, pool: Any) -> tuple[bool, bool]:
    """Whether to pool, and whether there is a sink."""
    for name, flag in (("sink", sink), ("pool", pool)):
        if flag is not None:
            check_flag(name, flag)
    if pool and len(shape) < 3:
        raise ValueError(f"pool=True needs a leading axis of texts, got scores of shape {tuple(shape)}")
    if sink and keys is None:
        raise ValueError(
            "sink must be False or None without keys=, got True: free importances contain the first key's; for a sink "
            "and no other importance pass keys=keys[..., :0]"
        )
    return (keys is not None and len(shape) > 3) if pool is None else pool, (keys is not None) if sink is None else sink


def _check_bands(bands: Any) -> tuple[int, ...]:
    if isinstance(bands, (str, bytes)) or not isinstance(bands, Sequence) or not all(map(is_integer, bands)):
        raise ValueError(f"bands must be a sequence of distances, got {bands!r}")
    if any(a >= b for a, b in pairwise(bands)):
        raise ValueError(f"bands must be distances that ascend, got {bands!r}")
    return tuple(map(int, bands))


def _check_pseudo_count(value: Any) -> float:
    number = check_number("pseudo_count", value, least=0)
    if number >= 1:
        raise ValueError(f"pseudo_count must be below 1, got {value!r}")
    return number


def _features(keys: Any, shape: Sequence[int], layout: Layout, *, pool: bool, sink: bool) -> Tensor:
    """Features per head ``[system, text, key, feature]``; the last one marks the first key, if there is a sink."""
    if not isinstance(keys, Tensor) or not keys.is_floating_point():
        raise ValueError(f"keys must be a floating point tensor, got {getattr(keys, 'dtype', type(keys).__name__)}")
    *batch, _, n_key = shape
    kv = keys.shape[-2] if keys.ndim > 1 else 0
    if not batch or tuple(keys.shape[:-2]) != (*batch[:-1], n_key) or kv == 0 or batch[-1] % kv:
        raise ValueError(
            "keys must have shape (*texts, key, kv_head, feature) beside scores of shape (*texts, head, query, key), "
            f"got {tuple(keys.shape)} and {tuple(shape)}"
        )
    if not bool(keys.isfinite().all()):
        raise ValueError(f"keys must be finite, got {int((~keys.isfinite()).sum())} values that are not")
    per_head = keys.detach().double().transpose(-3, -2).repeat_interleave(batch[-1] // kv, -3)
    features = by_system(per_head, 2, pool=pool)
    if sink:
        features = torch.cat([features, first_key(layout, features)], -1)
    return features


def first_key(layout: Layout, like: Tensor) -> Tensor:
    """A feature that marks the first key of each text, in the shape of others but for the last axis."""
    first = layout.keys.cumsum(-1) == 1
    return (first & layout.keys).to(like.dtype)[..., None].expand(*like.shape[:-1], 1)


@dataclass(frozen=True, eq=False)
class _Data:
    """What a fit needs of a pattern: its marginals, and those of uniform attention.

    Attributes:
        pattern: a pass over it.
        own: marginals of the pattern.
        marginals: the same with the pseudo-count.
        entropy: of each query.
        uniform: uniform attention over the same cells.
    """

    pattern: Pattern
    layout: Layout
    own: Stacked
    marginals: Stacked
    entropy: Float64[Tensor, "system text query"]
    uniform: AttentionSums
    pseudo_count: float

    @classmethod
    def read(cls, pattern: Pattern, layout: Layout, shape: Sequence[int], pseudo_count: float) -> _Data:
        """One pass over the pattern."""
        own = torch.zeros(*shape, layout.n_coefficient, dtype=torch.float64, device=layout.queries.device)
        entropy = own.new_zeros(*shape, layout.n_query)
        for systems, rows, columns, block in pattern():
            layout.add_sums(own[systems], block, rows, columns)
            entropy[systems][..., rows] = torch.special.entr(block).sum(-1)
        uniform = AttentionSums(layout, torch.zeros_like(own))
        marginals = torch.lerp(own, uniform.marginals, pseudo_count)
        return cls(pattern, layout, own, marginals, entropy, uniform, pseudo_count)

    def divergence(self, stacked: Stacked, log_z: Tensor) -> Float64[Tensor, "system text query"]:
        """KL(pattern ‖ additive attention) of each query: another pass."""
        divergence = log_z - self.entropy
        for systems, rows, columns, block in self.pattern():
            logits = self.layout.spread(stacked[systems], rows, columns)
            divergence[systems][..., rows] -= logits.mul_(block).sum(-1)
        return divergence

    def explained(self, divergence: Float64[Tensor, "system"]) -> Float64[Tensor, "system"]:
        """Share of the divergence from uniform attention that is gone."""
        from_uniform = (self.uniform.log_z - self.entropy).sum((-2, -1))
        return torch.where(from_uniform > 1e-12 * self.layout.n_query, 1 - divergence / from_uniform, torch.nan)


def _fit(
    data: _Data, features: Tensor | None, cells: Cells, batch: Sequence[int], *, pool: bool, sink: bool
) -> AttentionFit:
    keys: Keys = "free" if features is None else "features"
    _refuse_empty(data, free=features is None)
    extra, stacked, log_z = _solve(data, keys, features)
    kl = data.divergence(stacked, log_z)

    own, marginals = (data.layout.drop_bands(x) for x in (data.own, data.marginals))
    plain = replace(data, layout=data.layout.without_bands(), own=own, marginals=marginals)

    def alone(keys: Keys, *, distance: bool) -> Tensor:
        _, x, z = _solve(plain, keys, features, distance=distance, aim=_AIM_ALONE)
        return data.explained((z - data.entropy).sum((-2, -1)) - (x * own).sum((-2, -1)))

    by_distance, by_key = _fix_gauge(data.layout, stacked, free=features is None)
    direction = marker = None
    fit = batch[1:] if pool else batch
    if features is not None:
        of_features = extra.reshape(*fit, data.layout.n_band, -1)
        direction, marker = (of_features[..., :-1], of_features[..., -1]) if sink else (of_features, None)
    return AttentionFit(
        distance=by_distance.reshape(*fit, -1),
        key=to_batch(by_key, batch, pool=pool),
        distances=cells.distances,
        edges=data.layout.edges,
        direction=direction,
        sink=marker,
        kl=to_batch(kl, batch, pool=pool),
        explained=data.explained(kl.sum((-2, -1))).reshape(fit),
        explained_distance=alone("none", distance=True).reshape(fit),
        explained_key=alone(keys, distance=False).reshape(fit),
        cells=cells,
        pooled=pool,
        pseudo_count=data.pseudo_count,
    )


def _refuse_empty(data: _Data, *, free: bool) -> None:
    """Without a pseudo-count, what gets no attention has a coefficient of minus infinity."""
    by_distance, by_key = data.layout.split(data.marginals)
    distances, keys = data.layout.split(data.layout.used)
    no_distance = bool(((by_distance.sum(1) <= 0) & distances.any(1)).any())
    if no_distance or (free and bool(((by_key <= 0) & keys).any())):
        what = "distance" if no_distance else "key"
        raise ValueError(
            f"pseudo_count must be above 0, such as 1e-3, where a {what} gets no attention at all, got 0: its "
            "coefficient would be minus infinity"
        )


def _solve(
    data: _Data, keys: Keys, features: Tensor | None, *, distance: bool = True, aim: float = AIM
) -> tuple[Tensor, Stacked, Tensor]:
    """Coefficients beyond the distances, stacked ones, and normalisers; some systems at a time."""
    layout, (n_system, n_text) = data.layout, data.marginals.shape[:2]
    at_once = max(1, _AT_ONCE // (n_text * layout.n_key))
    parts = []
    for first in range(0, n_system, at_once):
        some = slice(first, first + at_once)
        chosen = features[some] if features is not None and keys == "features" else None
        design = Design(layout.select(some), n_text, distance=distance, keys=keys, features=chosen)
        solution = solve_attention(design, data.marginals[some], aim)
        parts.append((solution.coefficients[:, design.n_profile :], solution.stacked, solution.sums.log_z))
    extra, stacked, log_z = (torch.cat(x) for x in zip(*parts, strict=True))
    return extra, stacked, log_z


def _fix_gauge(layout: Layout, stacked: Stacked, *, free: bool) -> tuple[Tensor, Tensor]:
    """The same pattern from components in their convention: ``[system, distance]`` and ``[system, text, band, key]``.

    A softmax does not see constants, nor the straight line ``d[δ] + t·δ, k[j] + t·j``, which changes all logits of a
    query alike. The convention is that of ``fit_additive``: means 0 over the cells and no trend in the keys. With
    bands, constants move between the keys of a band and its distances, so keys have mean 0 in each band.
    Directions of features fix their importances, so there only the distances are centred.
    """
    by_distance, by_key = (x.clone() for x in layout.split(stacked))
    of_distance, of_key = layout.split(layout.counts.expand_as(stacked))
    if free:
        key = torch.arange(layout.n_key, device=stacked.device).double()
        lever = (key - _mean(key, of_key)) * of_key
        up, down = ((lever * x).sum((1, 2, 3)) for x in (by_key, key))
        slope = torch.where(down > 0, up / down, 0.0)
        distances = torch.arange(layout.low, layout.high + 1, device=stacked.device)
        by_distance -= slope[:, None, None] * distances
        by_key -= slope[:, None, None, None] * key
        of_text, of_band = _two_way_means(_mean(by_key, of_key)[..., 0], of_key.sum(-1))
        by_key -= of_text[:, :, None, None] + of_band[:, None, :, None]
        by_distance += of_band[:, None, layout.band]
        by_key *= of_key > 0
    by_distance, of_distance = by_distance[:, 0], of_distance.sum(1)
    return (by_distance - _mean(by_distance, of_distance)) * (of_distance > 0), by_key


def _mean(x: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, (x * weights).sum(-1, keepdim=True) / total, 0.0)


def _two_way_means(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares ``x[text, band] ≈ a[text] + b[band]``: what each text and each band can be rid of."""
    n_text = x.shape[-2]
    of_text, of_band = weights.sum(-1), weights.sum(-2)
    upper = torch.cat([torch.diag_embed(of_text), weights], -1)
    lower = torch.cat([weights.mT, torch.diag_embed(of_band)], -1)
    sums = torch.cat([(x * weights).sum(-1), (x * weights).sum(-2)], -1)
    means = (torch.linalg.pinv(torch.cat([upper, lower], -2), hermitian=True) @ sums[..., None])[..., 0]
    return means[..., :n_text], means[..., n_text:]
