"""Fit additive attention ``softmax_j(d[i - j] + k[j])`` to the attention patterns of heads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.attention.features import KeyFeatures
from tl_posdisent.additive.attention.newton import Problem, Solution, solve_attention
from tl_posdisent.additive.attention.patterns import (
    PatternBlocks,
    pattern_of_pattern,
    pattern_of_scores,
    refuse_unusable,
)
from tl_posdisent.additive.attention.result import AttentionFit
from tl_posdisent.additive.attention.sums import AttentionSums, Stacked
from tl_posdisent.additive.attention.systems import Systems, by_system, to_batch
from tl_posdisent.additive.cells import MaskKind, make_cells
from tl_posdisent.additive.identifiability import slope_over_keys, weighted_mean
from tl_posdisent.additive.score_checks import check_pool, read_scores, refuse_vectors
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer, check_number

PSEUDO_COUNT = 1e-3
"""The part of a pattern that is replaced by uniform attention."""
_KEYS_PER_FEATURE = 4  # with fewer, a direction fits other texts badly: the numbers are in ``fit_attention``
_UNIFORM_NATS = 1e-12  # nats per query: attention this close to uniform has nothing to explain


@torch.no_grad()
def fit_attention(
    scores: Float[Tensor, "*batch query key"] | Mapping[str, Tensor] | Sequence[Tensor] | Any = None,
    *,
    pattern: Float[Tensor, "*batch query key"] | Mapping[str, Tensor] | Sequence[Tensor] | Any = None,
    mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
    window: int | None = None,
    keys: Float[Tensor, "*texts key kv feature"] | None = None,
    sinks: int | None = None,
    pool: bool | None = None,
    pseudo_count: float | int = PSEUDO_COUNT,
) -> AttentionFit:
    """Fit ``softmax_j(distance[i - j] + key[j])`` to attention patterns by least Kullback-Leibler divergence.

    The fit minimises ``Σ_i KL(P_i ‖ Q_i)`` over the queries, in float64. The problem is convex. At its optimum, every
    distance and every key gets the same total attention as in the data.

    Args:
        scores: attention logits before the softmax, ``[*batch, query, key]``, e.g. ``cache["attn_scores", 3]``; a list
            or a cache of several layers as in ``fit_additive``.
        pattern: attention after the softmax, instead of scores; the rows must sum to 1 within the mask. A cache must
            then hold ``hook_pattern``.
        mask, window: as in ``fit_additive``.
        keys: features of the keys ``[*texts, key, kv_head, feature]``, e.g. unrotated key vectors. The importance is
            then ``direction · keys[j]``: a *static* head, which applies to other texts. Leading axes are those of the
            scores without the heads, that of several layers included; head h reads key head
            ``h // (heads // kv_heads)``. Without features (``keys[..., :0]``) a head has only its distance profile and
            ``sinks``.
        sinks: number of first keys that have a separate term each. Default: 1 with ``keys``, else 0.
        pool: fit one distance profile (and direction) to all entries of the first axis (texts), each with its own keys.
            Default: True only with ``keys`` and an axis of texts.
        pseudo_count: part of the pattern that is replaced by uniform attention, to keep coefficients finite where a key
            or a distance gets no attention. With 0, coefficients that would be infinite stop growing where the pattern
            no longer changes.

    Returns:
        An ``AttentionFit``. One warning names all fits that have not converged: they are the best found, with an
        estimate of their ``gap``. Another warns of a direction that is fitted to fewer than four keys per feature,
        which fits other texts badly. In 18 heads of SmolLM2 (64 features) the share explained in other texts was −0.27
        with 1.5 keys per feature, less than the 0.56 of distance and first token; 0.71 with 3 keys, 0.74 with 6, 0.75
        with 24.

    Raises:
        ValueError: neither or both of scores and pattern, or one passed as the other; keys of another shape; otherwise
            as ``fit_additive``.

    Example:
        >>> import torch
        >>> from tl_posdisent import fit_attention
        >>> i = torch.arange(6.0)
        >>> scores = -0.5 * (i[:, None] - i) + torch.tensor([3.0, 0, 0, 1, 0, 0])  # a slope and two high keys
        >>> scores = scores + 10 * torch.randn(6, 1)  # which the softmax ignores
        >>> fit_attention(scores, pseudo_count=0)
        AttentionFit of 1 pattern, 6 queries × 6 keys
          explained 1.000   KL ... nats per query
    """
    if (scores is None) == (pattern is None):
        raise ValueError("pass exactly one of scores or pattern=")
    name = "pattern" if scores is None else "scores"
    x, layers = read_scores(pattern if scores is None else scores, mask, bool(pool), name)

    shape = x.shape
    if pool is not None:
        check_pool(pool, "scores", x, 2)
    pool = (keys is not None and len(shape) > (3 if layers is None else 4)) if pool is None else pool
    sinks = int(keys is not None) if sinks is None else check_integer("sinks", sinks, 0)
    if sinks and keys is None:
        raise ArgumentError(
            "sinks",
            f"must be 0 or None without keys=, got {sinks}: free importances already include the first keys; to fit "
            "terms of the first keys and no other importance, pass keys=keys[..., :0]",
        )
    pseudo_count = check_number("pseudo_count", pseudo_count, least=0.0, below=1.0)
    batch = torch.Size(shape[:-2])
    cells = make_cells(shape, mask, window, device=x.device)
    systems = Systems.of(cells, batch, pool=pool)
    features = None if keys is None else KeyFeatures.of(keys, shape, systems, pool=pool, sinks=sinks)
    arranged = by_system(x, 2, pool=pool)
    if scores is None:
        blocks = pattern_of_pattern(systems, arranged)
    else:
        if mask == "causal":
            refuse_vectors(x)
        refuse_unusable(x, arranged, systems)
        blocks = pattern_of_scores(systems, arranged)
    data = _Data.read(blocks, arranged.shape[:2], systems, pseudo_count)
    if features is not None:
        n_keys = systems.keys.expand(features.values.shape[:3]).sum((1, 2))  # in the texts that share a direction
        _warn_of_few_keys(int(n_keys.min()), features.weights.shape[1] - sinks)
    result = replace(_solved(data, features, batch, pool=pool, sinks=sinks), layers=layers)
    _warn_of_unconverged(result)
    return result


def _solved(data: _Data, features: KeyFeatures | None, batch: torch.Size, *, pool: bool, sinks: int) -> AttentionFit:
    """Fit additive attention to the marginals that were read, and lay the coefficients out by text and head."""
    systems, cells = data.systems, data.systems.cells
    solution = solve_attention(Problem(systems, data.marginals, None if features is None else features.values))
    kl = data.divergence(solution)
    by_distance, by_key = _fix_gauge(systems, solution.stacked, free=features is None)
    fit = batch[1:] if pool else batch
    direction = of_sinks = None
    if features is not None:
        combined = solution.coefficients[:, cells.n_distance :]
        direction = torch.einsum("sfc,sc->sf", features.weights, combined).reshape(*fit, features.weights.shape[1])
        n_feature = direction.shape[-1] - sinks
        direction, of_sinks = direction[..., :n_feature], direction[..., n_feature:] if sinks else None
    total, n_rows = kl.sum((-2, -1)), systems.queries.expand(kl.shape).sum((-2, -1))
    return AttentionFit(
        distance=by_distance.reshape(*fit, -1),
        key=to_batch(by_key, batch, pool=pool),
        distances=cells.distances,
        direction=direction,
        sinks=of_sinks,
        kl=to_batch(kl, batch, pool=pool),
        explained=_explained_share(total, data.from_uniform, cells.n_query).reshape(fit),
        converged=solution.converged.reshape(fit),
        gap=solution.gap.minimum(total.clamp_min(0) / n_rows).reshape(fit),  # a divergence is at least 0
        cells=cells,
        pooled=pool,
        pseudo_count=data.pseudo_count,
    )


def _explained_share(
    divergence: Float64[Tensor, " system"], from_uniform: Float64[Tensor, " system"], n_query: int
) -> Float64[Tensor, " system"]:
    """Compute the share of the divergence from uniform attention that a fit removes; NaN if the pattern is uniform."""
    return torch.where(from_uniform > _UNIFORM_NATS * n_query, 1 - divergence / from_uniform, torch.nan)


@dataclass(frozen=True, eq=False)
class _Data:
    """What a fit needs to know of a pattern: marginals with the pseudo-count, and the entropy of each query."""

    pattern: PatternBlocks
    systems: Systems
    marginals: Stacked
    entropy: Float64[Tensor, "system text query"]
    uniform: AttentionSums
    pseudo_count: float

    @classmethod
    def read(cls, pattern: PatternBlocks, shape: Sequence[int], systems: Systems, pseudo_count: float) -> _Data:
        """Read the data in one pass over the pattern."""
        cells, device = systems.cells, systems.counts.device
        sums = torch.zeros(*shape, systems.counts.shape[-1], dtype=torch.float64, device=device)
        entropy = sums.new_zeros(*shape, cells.n_query)
        for chosen, rows, columns, block in pattern():
            cells.add_sums(sums[chosen], block, rows, columns)
            entropy[chosen][..., rows] = torch.special.entr(block).sum(-1)
        uniform = AttentionSums(systems, torch.zeros_like(systems.counts))  # the same where the cells are
        marginals = torch.lerp(sums, uniform.marginals, pseudo_count)
        return cls(pattern, systems, marginals, entropy, uniform, pseudo_count)

    def divergence(self, solution: Solution) -> Float64[Tensor, "system text query"]:
        """Compute KL(pattern ‖ additive attention) for each query, in another pass over the pattern."""
        divergence = solution.log_z - self.entropy
        for chosen, rows, columns, block in self.pattern():
            logits = self.systems.cells.spread(solution.stacked[chosen], rows, columns)
            divergence[chosen][..., rows] -= logits.mul_(block).sum(-1)
        return divergence

    @property
    def from_uniform(self) -> Float64[Tensor, " system"]:
        """Divergence from uniform attention, summed over queries."""
        return (self.uniform.log_z - self.entropy).sum((-2, -1))


def _warn_of_unconverged(fit: AttentionFit) -> None:
    """Warn once, naming all fits that have not converged."""
    missing = (~fit.converged).nonzero().tolist()
    if missing:
        gap = float(fit.gap[~fit.converged].max())
        shown = ", ".join(str(tuple(index)) for index in missing[:10]) + (", …" if len(missing) > 10 else "")
        warnings.warn(
            f"{len(missing)} of {fit.converged.numel()} fits of attention have not converged, at index {shown}: they "
            f"are the best found, with a divergence up to about {gap:.0e} nats per query above the minimum (see "
            "converged and gap); a larger pseudo_count makes the problem better posed",
            UserWarning,
            stacklevel=4,
        )


def _warn_of_few_keys(n_key: int, n_feature: int) -> None:
    """Warn if a direction is fitted to too few keys to apply to other texts."""
    needed = _KEYS_PER_FEATURE * n_feature
    if n_key < needed:
        warnings.warn(
            f"a static head's direction of {n_feature} features is fitted to {n_key} keys: with fewer than "
            f"{_KEYS_PER_FEATURE} per feature, {needed} in all, it overfits these texts; pass more texts, pooled, or "
            "fewer features",
            UserWarning,
            stacklevel=4,
        )


def _fix_gauge(systems: Systems, stacked: Stacked, *, free: bool) -> tuple[Tensor, Tensor]:
    """Convert coefficients to the gauge of ``AttentionFit``: ``[system, distance]`` and ``[system, text, key]``.

    A direction of features determines the importances, so then only the distances are centred.
    """
    cells = systems.cells
    by_distance, _, by_key = (x.clone() for x in cells.split(stacked))
    of_distance, _, of_key = cells.split(systems.counts.expand_as(stacked))
    if free:
        slope = slope_over_keys(by_key, of_key, shared=(1,))
        by_distance -= slope * cells.distances
        by_key -= slope * torch.arange(cells.n_key, device=stacked.device)
        by_key = (by_key - weighted_mean(by_key, of_key)) * (of_key > 0)
    by_distance, of_distance = by_distance[:, 0], of_distance.sum(1)
    return (by_distance - weighted_mean(by_distance, of_distance)) * (of_distance > 0), by_key
