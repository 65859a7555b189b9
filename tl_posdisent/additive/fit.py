"""Least-squares fit of attention scores by a distance, a query and a key component (three-axis additivity)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, MaskKind, Parts, Runs, Scattered, make_cells
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.additive.score_checks import (
    check_scores,
    refuse_masking_values,
    refuse_non_finite,
    refuse_patterns,
    warn_of_vectors,
)
from tl_posdisent.additive.solver import pooled, solve
from tl_posdisent.utils.precision import own_sums
from tl_posdisent.utils.validation import check_flag

_ROWS, _CELLS = 64, 2**18  # that are read at a time, at most, and converted: they stay in a processor's cache
ROUNDING = 1e-14  # scores that vary by less than this of their size do not vary


@dataclass(frozen=True, eq=False)
class Marginals:
    """Sums of ``scores - pivot`` over the cells; the pivot is near the mean, so that squares do not cancel.

    Attributes:
        pivot: what was subtracted from the scores.
        sums: over the cells of each distance, query and key, stacked.
        squares: over all cells.
    """

    pivot: Float64[Tensor, "*batch"]
    sums: Float64[Tensor, "*batch coefficient"]
    squares: Float64[Tensor, "*batch"]

    def about(self, pivot: Float64[Tensor, "*batch"], cells: Cells) -> Marginals:
        """Convert to the sums of ``scores - pivot`` over the same cells, for another pivot."""
        shift = self.pivot - pivot
        total = cells.split(self.sums).query.sum(-1)
        squares = self.squares + shift * (2 * total + cells.n_cells * shift)
        return Marginals(pivot, torch.addcmul(self.sums, cells.counts, shift[..., None]), squares)


def read_marginals(
    scores: Float[Tensor, "*batch query key"], cells: Cells, name: str = "scores", *, suspicious: bool = False
) -> Marginals:
    """Sum every score matrix over ``cells`` along each axis, in float64.

    Args:
        name: of the scores, for errors.
        suspicious: look for masking values such as -1e9 too; not where the user has marked every cell that counts.

    Raises:
        ValueError: a cell inside the mask is NaN, infinite or a masking value; says where the first one is.
    """
    batch, (n_query, n_key) = scores.shape[:-2], scores.shape[-2:]
    flat, which = scores.reshape(-1, n_query, n_key), None  # flat index of the mask of every matrix, if not shared
    if leading := cells.counts.shape[:-1]:
        which = torch.arange(leading.numel(), device=scores.device).reshape(leading).expand(batch).flatten()
    n = flat.shape[0]
    sums = flat.new_zeros(n, cells.counts.shape[-1], dtype=torch.float64)
    by_distance, by_query, by_key = cells.split(sums)
    pivot, squares, lowest = (flat.new_zeros(n, dtype=torch.float64) for _ in range(3))

    on_cpu = scores.device.type == "cpu"
    at_once = _CELLS if on_cpu else 2**24
    rows = min(n_query, max(1, at_once // n_key), _ROWS if on_cpu else n_query)
    heads = max(1, at_once // (rows * n_key))
    for first in range(0, n, heads):
        some = slice(first, first + heads)
        masks = None if which is None else which[some]
        pivot[some] = _typical(flat[some], cells, masks)
        for row in range(0, n_query, rows):
            lines = slice(row, min(row + rows, n_query))
            columns = cells.columns(lines)
            if columns.start == columns.stop:
                continue
            block = flat[some, lines, columns].to(torch.float64, copy=True, memory_format=torch.contiguous_format)
            block.sub_(pivot[some, None, None])
            inside = cells.inside(lines, columns, masks)
            touched = (~inside).flatten(0, -2).any(0).nonzero()
            if len(touched):  # most columns have no cell to hide
                hidden = slice(int(touched[0]), int(touched[-1]) + 1)
                block[..., hidden].masked_fill_(~inside[..., hidden], 0.0)
            cells.add_diagonals(by_distance[some], block, lines, columns)
            by_query[some, lines] += block.sum(-1)
            by_key[some, columns] += block.sum(-2)
            lowest[some] = lowest[some].minimum(block.amin((-2, -1)) + pivot[some])
            squares[some] += torch.linalg.vector_norm(block, dim=(-2, -1)).square()
    pivot, sums, squares = pivot.reshape(batch), sums.reshape(*batch, -1), squares.reshape(batch)
    total = cells.split(sums).query.sum(-1)
    refuse_non_finite(scores, cells, squares + pivot * (2 * total + cells.n_cells * pivot), name)
    if suspicious:
        refuse_masking_values(scores, cells, lowest, name)
    return Marginals(pivot, sums, squares)


def _typical(
    x: Float[Tensor, "matrix query key"], cells: Cells, masks: Int64[Tensor, "matrix"] | None
) -> Float64[Tensor, "matrix"]:
    """Estimate the mean of each matrix from a few of its rows, or from all where these have no cells."""
    for step in (max(1, cells.n_query // 8), 1):
        rows = slice(0, cells.n_query, step)
        inside = cells.inside(rows, slice(0, cells.n_key), masks)
        count = inside.sum((-2, -1))
        if bool(count.all()):
            break
    mean = x[:, rows].double().masked_fill(~inside, 0.0).sum((-2, -1)) / count
    return torch.where(mean.abs() < 1e30, mean, 0.0)  # NaN and masking values are reported later


def fix_gauge(
    cells: Cells, weights: Float64[Tensor, "*mask coefficient"], solution: Tensor, *, pool: bool = False
) -> tuple[Float64[Tensor, "*batch"], Parts]:
    """Return the intercept and components in the gauge of ``AdditiveFit``.

    Two constants and the straight line ``a[d] + t·d, b[i] − t·i, c[j] + t·j`` change no fitted value. Components get
    mean 0 over the cells, and ``c`` a least-squares slope of 0 over key positions (of all texts, if they are pooled).
    """
    numbers = cells.split(weights)
    key = torch.arange(cells.n_key, device=solution.device).double()
    lever = (key - weighted_mean(key, numbers.key)) * numbers.key
    up, down = (lever * cells.split(solution).key).sum(-1, keepdim=True), (lever * key).sum(-1, keepdim=True)
    if pool:
        up, down = (x.expand_as(up).sum(0, keepdim=True) for x in (up, down))
    slope = torch.where(down > 0, up / down, 0.0)
    query = torch.arange(cells.n_query, device=solution.device) + cells.offset
    line = torch.cat([-cells.distances, query, -key])
    tilted = cells.split(torch.addcmul(solution, slope, line))
    means = [weighted_mean(x, n) for x, n in zip(tilted, numbers, strict=True)]
    # A distance, query or key without cells has no coefficient: it is given as 0.
    parts = ((x - m) * (n > 0) for x, m, n in zip(tilted, means, numbers, strict=True))
    return (means[0] + means[1] + means[2])[..., 0], Parts(*parts)


def weighted_mean(x: Tensor, weights: Tensor) -> Tensor:
    """Over the last axis, which stays; 0 without weights."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, (x * weights).sum(-1, keepdim=True) / total, 0.0)


_NEGLIGIBLE = 1e-9  # an eigenvalue below this times the largest is a gauge direction


def count_parameters(cells: Cells, n_texts: int | None = None) -> Int64[Tensor, "*fit"]:
    """Count the rank of the additive design, per set of cells; over all texts if they are pooled (``n_texts`` given).

    Queries and keys alone have a rank of their number, less one constant for each piece that the cells fall into.
    The distances add theirs, less the profiles that queries and keys can express. Where two neighbouring queries
    and two neighbouring keys have all their four cells, such a profile has no kink at their distance. If that holds
    at every distance it is a straight line, so there are two; if not, the rank of the distances is computed.
    """
    by_distance, by_query, by_key = cells.split(cells.counts)
    rank = (by_query > 0).sum(-1) + (by_key > 0).sum(-1) - _count_pieces(cells)
    n_cells, used, no_kink = cells.n_cells.long(), by_distance > 0, _has_no_kink(cells)
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
    if isinstance(cells, Runs):
        # A piece begins where a run of keys begins that no earlier run reaches.
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
        new = new.gather(-1, new)  # and the label of that one
        if torch.equal(new, label):
            return (used & (label == key)).sum(-1)
        label = new


def _has_no_kink(cells: Cells) -> Bool[Tensor, "*mask inner"]:
    """Find the distances (but for the lowest and the highest) at which some neighbouring 2 × 2 cells all exist."""
    if isinstance(cells, Runs):
        first, stop = cells.first_query, cells.stop_query
        start = torch.maximum(first[..., 1:-1], first[..., :-2]).maximum(first[..., 2:] - 1)
        end = torch.minimum(stop[..., 1:-1] - 1, stop[..., :-2]).minimum(stop[..., 2:] - 1)
        return start < end
    assert isinstance(cells, Scattered)
    cell = cells.query_distance > 0
    upper, lower = cell[..., :-1, :], cell[..., 1:, :]
    return (upper[..., 1:-1] & lower[..., 1:-1] & upper[..., :-2] & lower[..., 2:]).any(-2)


def _rank_of_distances(cells: Cells, *, pool: bool) -> Int64[Tensor, "*fit"]:
    """Compute the rank of the distances' normal matrix after queries and keys are projected out."""
    if isinstance(cells, Runs):
        cells = Scattered.from_mask(cells.to_mask())
    assert isinstance(cells, Scattered)
    n_d, n_q, n_k = cells.split(cells.counts)
    per_query = torch.where(n_q > 0, 1 / n_q, 0.0)[..., None]
    keys = torch.diag_embed(n_k) - cells.query_key.mT @ (per_query * cells.query_key)
    mixed = cells.key_distance - cells.query_key.mT @ (per_query * cells.query_distance)
    values, vectors = torch.linalg.eigh(keys)
    kept = values > _NEGLIGIBLE * n_k.amax(-1, keepdim=True)
    seen = (vectors.mT @ mixed) * torch.where(kept, values, torch.inf).rsqrt()[..., None]
    rest = torch.diag_embed(n_d) - cells.query_distance.mT @ (per_query * cells.query_distance) - seen.mT @ seen
    if pool and rest.ndim > 2:
        rest, n_d = rest.sum(0), n_d.sum(0)
    scale = n_d.amax(-1, keepdim=True)  # counts: what is far below one cell is rounding
    remaining: Tensor = torch.linalg.eigvalsh(rest)
    return (remaining > _NEGLIGIBLE * scale).sum(-1)


@own_sums()
def fit_additive(
    scores: Float[Tensor, "*batch query key"] | Mapping[str, Tensor] | Sequence[Tensor] | Any,
    *,
    mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
    window: int | None = None,
    sinks: int = 0,
    pool: bool = False,
    check: bool = True,
) -> AdditiveFit:
    """Fit ``scores[i, j] ≈ intercept + distance[i - j] + query[i] + key[j]`` by least squares, for all heads at once.

    The three-axis model of arXiv 2503.13305, §3: position (the distance), a bias of the query and an importance of the
    key. Cells outside the mask may hold anything. Sums run in float64 whatever the dtype.

    Args:
        scores: attention logits before the softmax, ``[*batch, query, key]``, e.g. ``cache["attn_scores", 3]``. The
            last query stands at the last key: with fewer queries than keys, query ``i`` is at ``i + n_key - n_query``.
            Or a list of such tensors, or a cache of ``run_with_cache`` with ``hook_attn_scores``: scores of several
            layers get one more axis, before the heads, and tables a column ``layer``.
        mask: ``"causal"`` (key not after query), ``"full"`` (bidirectional), or a boolean tensor that is True where a
            cell counts, shared ``[query, key]`` or one per matrix (broadcast against the leading axes).
        window: keep only cells with ``|distance| < window`` (Mistral's and Gemma's sliding window).
        sinks: leave this many keys at the beginning (attention sinks) out of the fit; their importance is 0.
        pool: one distance profile for all entries of the first axis (texts), each with its own query and key part.
        check: refuse an attention pattern (rows that are non-negative and sum to 1), and warn of what may be q, k, v
            or z (fewer "queries" than "keys", finite also where a causal mask is).

    Returns:
        An ``AdditiveFit``: components with their gauge fixed, ``r``, shares, ``fitted()``, ``residual()``, tables.

    Raises:
        ValueError: scores that are no floating point matrices; a mask of wrong dtype or size or that leaves nothing; a
            cell inside the mask that is NaN, infinite or a masking value such as -1e9 (says where, and which mask to
            pass; a boolean mask is taken as it is); an attention pattern, unless ``check=False``.

    Example:
        >>> import torch
        >>> from tl_posdisent import fit_additive
        >>> i = torch.arange(6.0)
        >>> scores = -0.5 * (i[:, None] - i) + torch.tensor([3.0, 0, 0, 1, 0, 0])  # a slope and two high keys
        >>> fit = fit_additive(scores)
        >>> fit
        AdditiveFit of one score matrices, 6 queries × 6 keys, 21 cells, 15 parameters
          r 1.000   r² 1.000   adjusted r² 1.000
          alone: distance ...   query ...   key ...
        >>> bool(torch.allclose(fit.fitted(), scores.double().tril()))
        True
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> _, cache = load_demo_model().run_with_cache(demo_tokens(length=32))
        >>> fit_additive(cache).to_frame().groupby("layer")["r"].mean().round(2).tolist()
        [0.55, 0.79, 0.82, 0.84, 0.87]
    """
    layers: tuple[int, ...] | None = None
    if not isinstance(scores, Tensor):
        scores, layers = _stacked(scores)
    scores = check_scores(scores).detach()
    check_flag("pool", pool)
    check_flag("check", check)
    if pool and scores.ndim < 3:
        raise ValueError(f"pool=True needs a leading axis of texts, got scores of shape {tuple(scores.shape)}")
    cells = make_cells(scores.shape, mask, window, sinks=sinks, device=scores.device)
    if check:
        refuse_patterns(scores, 'pass cache["attn_scores", layer], or check=False to fit these values as they are')
        if mask == "causal":
            warn_of_vectors(scores)
    read = read_marginals(scores, cells, suspicious=isinstance(mask, str))
    return replace(fit_marginals(read, cells, pool=pool), layers=layers)


def _stacked(scores: Any) -> tuple[Tensor, tuple[int, ...]]:
    """Scores of several layers as one tensor, with an axis of layers before the heads."""
    if hasattr(scores, "items"):
        named = {re.fullmatch(r"blocks\.(\d+)\.attn\.hook_attn_scores", str(name)): x for name, x in scores.items()}
        by_layer = {int(found[1]): x for found, x in named.items() if found}
        if not by_layer:
            raise ValueError(
                "scores must be a tensor, a list of tensors, or a cache that holds hook_attn_scores, got one without: "
                'run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_attn_scores"))'
            )
    elif isinstance(scores, (list, tuple)) and scores:
        by_layer = dict(enumerate(scores))
    else:
        raise ValueError(f"scores must be a torch.Tensor, a list of them or a cache, got {type(scores).__name__}")
    each = [check_scores(by_layer[layer], f"scores of layer {layer}") for layer in sorted(by_layer)]
    shapes = {tuple(x.shape) for x in each}
    if len(shapes) > 1 or each[0].ndim < 3:
        raise ValueError(
            f"scores of several layers must have one shape (*batch, head, query, key), got {sorted(shapes)}"
        )
    return torch.stack([x.to(each[0].device) for x in each], -4), tuple(sorted(by_layer))


def fit_marginals(
    read: Marginals, cells: Cells, *, pool: bool = False, size: Float64[Tensor, "*batch"] | float = 0.0
) -> AdditiveFit:
    """Fit the scores that have these marginal sums.

    Args:
        size: of the terms that make up a score, where these are larger than the scores. Scores that vary by no more
            than its rounding do not vary.
    """
    weights, n_cells = cells.counts, cells.n_cells
    if pool:
        # One pivot for all texts: every sum and square is then about the same number.
        read = read.about(read.pivot.mean(0, keepdim=True).expand_as(read.pivot), cells)
        weights = pooled(cells, weights.expand_as(read.sums))
        n_cells = n_cells.expand_as(read.pivot).sum(0)
    sums = pooled(cells, read.sums) if pool else read.sums
    squares, pivot = (read.squares.sum(0), read.pivot[0]) if pool else (read.squares, read.pivot)

    solution = solve(cells, sums, pool=pool)
    offset, parts = fix_gauge(cells, weights, solution, pool=pool)

    # Variation about the mean of all cells: in total, explained by the model, and by each axis alone.
    mean = _axis_sums(cells, sums, pool=pool)[0] / n_cells
    total = squares - n_cells * mean**2
    centred = torch.addcmul(sums, weights, mean[..., None], value=-1)
    explained = sum(_axis_sums(cells, solution * centred, pool=pool))
    alone = _axis_sums(cells, torch.where(weights > 0, centred**2 / weights, 0.0), pool=pool)
    size = torch.as_tensor(size, dtype=mean.dtype, device=mean.device)
    size = (mean + pivot).abs().maximum(size.amax(0) if pool and size.ndim else size)
    constant = total <= n_cells * (ROUNDING * size) ** 2
    r2, *shares = (torch.where(constant, torch.nan, (x / total).clamp(0, 1)) for x in (explained, *alone))
    n_cells = n_cells.expand_as(r2)
    n_parameters = count_parameters(cells, len(sums) if pool else None).expand_as(r2)
    spare = n_cells - n_parameters  # residual degrees of freedom; without any, the model fits whatever there is
    r2 = torch.where(spare > 0, r2, torch.nan)
    return AdditiveFit(
        intercept=read.pivot + offset,
        distance=parts.distance[0] if pool else parts.distance,
        query=parts.query,
        key=parts.key,
        distances=cells.distances,
        r=r2.sqrt(),
        r2=r2,
        r2_adjusted=torch.where(spare > 0, 1 - (1 - r2) * (n_cells - 1) / spare, torch.nan),
        share_distance=shares[0],
        share_query=shares[1],
        share_key=shares[2],
        n_cells=n_cells.long(),
        n_parameters=n_parameters,
        cells=cells,
        pooled=pool,
    )


def explained_around(
    read: Marginals, cells: Cells, profiles: Float64[Tensor, "profile *batch distance"]
) -> Float64[Tensor, "profile *batch"]:
    """r² of *given* distance profiles (0: none) with the best query and key components of these scores.

    It is ``1 - residual / total``, below that of queries and keys alone where the profile is worse than none, and NaN
    for a profile of NaN.
    """
    coefficients = read.sums.new_zeros(len(profiles), *read.sums.shape)
    cells.split(coefficients).distance.copy_(profiles.nan_to_num())
    put_in = cells.product(coefficients)
    left = read.sums - put_in
    # Not of what is left: sums that nearly cancel are no longer those of one matrix.
    solution = solve(cells, read.sums, distances=False) - solve(cells, put_in, distances=False)
    residual = read.squares - (coefficients * (read.sums + left)).sum(-1) - (solution * left).sum(-1)
    total = read.squares - cells.split(read.sums).query.sum(-1) ** 2 / cells.n_cells
    undefined = (total <= cells.n_cells * (ROUNDING * read.pivot) ** 2) | profiles.isnan().any(-1)
    return torch.where(undefined, torch.nan, 1 - residual.clamp_min(0) / total)


def _axis_sums(cells: Cells, stacked: Tensor, *, pool: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over distances, queries and keys; pooled texts have their own queries and keys, and the same distances."""
    d, q, k = (x.sum(-1) for x in cells.split(stacked))
    return (d[0], q.sum(0), k.sum(0)) if pool else (d, q, k)
