"""What the cells determine: the number of parameters, and one gauge for those that change no fitted value."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, ConvexCells, Parts, Scattered

_GAUGE_TOLERANCE = 1e-9  # an eigenvalue below this times the largest is a gauge direction


def design_rank(cells: Cells, n_texts: int | None = None) -> Int64[Tensor, "*fit"]:
    """Compute the rank of the additive design for each set of cells, or for all texts pooled if ``n_texts`` is given.

    The rank of queries and keys alone is their number, minus one constant for each connected component of the cells.
    The distances add their number, minus the dimension of the profiles that queries and keys can express. Where two
    neighbouring queries and two neighbouring keys have all four cells, such a profile has no kink at their distance. If
    this is so at every distance, the profile is a straight line, of dimension two; otherwise the rank of the distances
    is computed numerically.
    """
    by_distance, by_query, by_key = cells.split(cells.counts)
    rank = (by_query > 0).sum(-1) + (by_key > 0).sum(-1) - _count_pieces(cells)
    n_cells, used, no_kink = by_query.sum(-1).long(), by_distance > 0, _has_no_kink(cells)
    one_each = ((by_query <= 1).all(-1) | (by_key <= 1).all(-1)).expand_as(n_cells)
    if n_texts is not None:
        one_each = one_each.all()
        if rank.ndim == 0:
            rank, n_cells = rank * n_texts, n_cells * n_texts
        else:
            repeats = n_texts // rank.shape[0]
            rank, n_cells = rank.sum(0) * repeats, n_cells.sum(0) * repeats
            used, no_kink = used.any(0), no_kink.any(0)
    of_distances = (used.sum(-1) - 2).clamp_min(0)
    if not bool((one_each | (no_kink.sum(-1) == of_distances)).all()):
        of_distances = _rank_of_distances(cells, pool=n_texts is not None)
    return torch.where(one_each, n_cells, rank + of_distances)


def _count_pieces(cells: Cells) -> Int64[Tensor, "*mask"]:
    """Count connected components, where two cells are neighbours if they share a query or a key."""
    if isinstance(cells, ConvexCells):
        # A component begins at the first key of a span that no earlier span reaches.
        empty = cells.first_key == cells.stop_key
        first, order = cells.first_key.masked_fill(empty, cells.n_key).sort(-1)
        reach = cells.stop_key.masked_fill(empty, 0).gather(-1, order).cummax(-1).values
        reach = torch.nn.functional.pad(reach[..., :-1], (1, 0))
        return ((first >= reach) & (first < cells.n_key)).sum(-1)
    mask, key = cells.to_mask(), torch.arange(cells.n_key, device=cells.counts.device)
    used, label = mask.any(-2), key.expand(*mask.shape[:-2], -1)
    while True:  # every key takes the lowest label among the keys that it shares a query with
        lowest = torch.where(mask, label[..., None, :], cells.n_key).amin(-1)
        new = torch.where(mask, lowest[..., :, None], cells.n_key).amin(-2).minimum(label)
        new = new.gather(-1, new)  # then the label of that key
        if torch.equal(new, label):
            return (used & (label == key)).sum(-1)
        label = new


def _has_no_kink(cells: Cells) -> Bool[Tensor, "*mask inner"]:
    """Find the distances, except for the lowest and the highest, at which some 2 × 2 block of cells is complete."""
    if isinstance(cells, ConvexCells):
        first, stop = cells.first_query, cells.stop_query
        start = torch.maximum(first[..., 1:-1], first[..., :-2]).maximum(first[..., 2:] - 1)
        end = torch.minimum(stop[..., 1:-1] - 1, stop[..., :-2]).minimum(stop[..., 2:] - 1)
        return start < end
    assert isinstance(cells, Scattered)
    cell = cells.query_distance > 0
    upper, lower = cell[..., :-1, :], cell[..., 1:, :]
    return (upper[..., 1:-1] & lower[..., 1:-1] & upper[..., :-2] & lower[..., 2:]).any(-2)


def _rank_of_distances(cells: Cells, *, pool: bool) -> Int64[Tensor, "*fit"]:
    """Compute the rank of the distances' normal matrix after projecting out queries and keys."""
    if isinstance(cells, ConvexCells):
        cells = Scattered.from_mask(cells.to_mask())
    assert isinstance(cells, Scattered)
    n_d, n_q, n_k = cells.split(cells.counts)
    per_query = torch.where(n_q > 0, 1 / n_q, 0.0)[..., None]
    keys = torch.diag_embed(n_k) - cells.query_key.mT @ (per_query * cells.query_key)
    mixed = cells.key_distance - cells.query_key.mT @ (per_query * cells.query_distance)
    values, vectors = torch.linalg.eigh(keys)
    kept = values > _GAUGE_TOLERANCE * n_k.amax(-1, keepdim=True)
    seen = (vectors.mT @ mixed) * torch.where(kept, values, torch.inf).rsqrt()[..., None]
    rest = torch.diag_embed(n_d) - cells.query_distance.mT @ (per_query * cells.query_distance) - seen.mT @ seen
    if pool and rest.ndim > 2:
        rest, n_d = rest.sum(0), n_d.sum(0)
    scale = n_d.amax(-1, keepdim=True)  # entries are counts of cells, so much smaller values are rounding
    remaining: Tensor = torch.linalg.eigvalsh(rest)
    return (remaining > _GAUGE_TOLERANCE * scale).sum(-1)


def fix_gauge(
    cells: Cells, weights: Float64[Tensor, "*mask coefficient"], solution: Tensor, *, pool: bool = False
) -> tuple[Float64[Tensor, "*batch"], Parts]:
    """Convert a solution to the intercept and components in the gauge of ``AdditiveFit``.

    Two constants and the straight line ``a[d] + t·d, b[i] − t·i, c[j] + t·j`` change no fitted value. Components get
    mean 0 over the cells, and ``c`` a least-squares slope of 0 over the cells' key positions (of all texts, if pooled).
    """
    numbers = cells.split(weights)
    slope = slope_over_keys(cells.split(solution).key, numbers.key, shared=(0,) if pool else ())
    query = torch.arange(cells.n_query, device=solution.device) + (cells.n_key - cells.n_query)
    key = torch.arange(cells.n_key, device=solution.device)
    line = torch.cat([-cells.distances, query, -key]).double()
    tilted = cells.split(torch.addcmul(solution, slope, line))
    means = [weighted_mean(x, n) for x, n in zip(tilted, numbers, strict=True)]
    # A distance, query or key without cells has no coefficient; report 0.
    parts = ((x - m) * (n > 0) for x, m, n in zip(tilted, means, numbers, strict=True))
    return (means[0] + means[1] + means[2])[..., 0], Parts(*parts)


def slope_over_keys(
    by_key: Float64[Tensor, "*row key"], counts: Float64[Tensor, "*#row key"], *, shared: tuple[int, ...] = ()
) -> Float64[Tensor, "*#row 1"]:
    """Compute the least-squares slope over key positions, weighted by the numbers of cells; 0 where it is undefined.

    Each row has its own constant; the rows of the axes ``shared``, which are kept, have one slope.
    """
    key = torch.arange(by_key.shape[-1], device=by_key.device).double()
    lever = (key - weighted_mean(key, counts)) * counts
    up = (lever * by_key).sum(-1, keepdim=True)
    down = (lever * key).sum(-1, keepdim=True).expand_as(up)
    if shared:
        up, down = (x.sum(shared, keepdim=True) for x in (up, down))
    return torch.where(down > 0, up / down, 0.0)


def weighted_mean(x: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted mean over the last axis, which is kept; 0 where all weights are 0."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, (x * weights).sum(-1, keepdim=True) / total, 0.0)
