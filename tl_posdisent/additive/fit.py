"""Least-squares fit of attention scores by a distance, a query and a key component (three-axis additivity).

The normal equations are solved without a matrix. Their three diagonal blocks are diagonal themselves (numbers of
cells), and a product with the rest is cheap (``Cells.product``), so conjugate gradients with the diagonal as
preconditioner needs about fifteen O(length) steps; a narrow window needs ``_tension`` too. The system is singular (see
``fix_gauge``) but consistent, and conjugate gradients then converges to one of its solutions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, Marginals, MaskKind, Parts, Runs, Scattered, make_cells, read_marginals
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.additive.score_checks import check_scores, refuse_patterns, warn_of_vectors
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import own_sums
from tl_posdisent.utils.validation import check_flag

ROUNDING = 1e-14  # scores that vary by less than this of their size do not vary

# Relative size of the residual of the normal equations, in the norm of the preconditioner: what a run of conjugate
# gradients aims at by its own reckoning, what the true residual must then be to need no second run (which would
# only chase rounding), and what is an error if it is still exceeded. They are relative to the marginals, or to a tenth
# of the scores where the marginals are smaller: of scores without an additive part these are
# rounding, which no model has.
AIM, ENOUGH, ACCEPTED, OF_SCORES = 1e-13, 1e-12, 1e-10, 0.1

Stacked = Float64[Tensor, "*batch coefficient"]


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

    This is the three-axis model of arXiv 2503.13305, §3: position (the distance), a bias of the query and an importance
    of the key. Cells outside the mask may hold any value. Sums are computed in float64, whatever the dtype.

    Args:
        scores: attention logits before the softmax, ``[*batch, query, key]``, e.g. ``cache["attn_scores", 3]``. The
            last query is at the last key: with fewer queries than keys, query ``i`` is at ``i + n_key - n_query``.
            Also a list of such tensors, one per layer, or a cache of ``run_with_cache`` with ``hook_attn_scores``: the
            result then has an axis of layers before the heads, and its tables a column ``layer``.
        mask: ``"causal"`` (key not after query), ``"full"`` (bidirectional), or a boolean tensor that is True where a
            cell counts, shared ``[query, key]`` or one per matrix (broadcast against the leading axes).
        window: keep only cells with ``|distance| < window`` (Mistral's and Gemma's sliding window).
        sinks: leave this many first keys (attention sinks) out of the fit; their importance is 0.
        pool: fit one distance profile to all entries of the first axis (texts), each with its own query and key part.
        check: raise for an attention pattern (rows that are non-negative and sum to 1), and warn if the tensor may be
            q, k, v or z (fewer "queries" than "keys", and no causal mask).

    Returns:
        An ``AdditiveFit``: components with their gauge fixed, ``r``, shares, ``fitted()``, ``residual()``, tables.

    Raises:
        ValueError: scores that are not floating point matrices; a mask of the wrong dtype or size, or without any cell;
            a cell inside the mask that is NaN, infinite or a masking value such as -1e9 (the message says where, and
            which mask to pass; a boolean mask is not checked for masking values); an attention pattern, unless
            ``check=False``.

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
    """Stack scores of several layers into one tensor, with an axis of layers before the heads."""
    if hasattr(scores, "items"):
        named = {re.fullmatch(r"blocks\.(\d+)\.attn\.hook_attn_scores", str(name)): x for name, x in scores.items()}
        by_layer = {int(found[1]): x for found, x in named.items() if found}
        if not by_layer:
            raise ArgumentError(
                "scores",
                "must be a tensor, a list of tensors, or a cache that holds hook_attn_scores, got a cache without it; "
                'use run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_attn_scores"))',
            )
    elif isinstance(scores, (list, tuple)) and scores:
        by_layer = dict(enumerate(scores))
    else:
        raise ArgumentError("scores", f"must be a torch.Tensor, a list of them or a cache, got {type(scores).__name__}")
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
        size: magnitude of the terms that make up a score, where these are larger than the scores. Scores that vary by
            no more than the rounding of such terms are treated as constant.
    """
    weights = cells.counts
    if pool:
        # With one pivot for all texts, their sums and squares refer to the same number and can be added.
        read = read.about(read.pivot.mean(0, keepdim=True).expand_as(read.pivot), cells)
        weights = pooled(cells, weights.expand_as(read.sums))
    sums = pooled(cells, read.sums) if pool else read.sums
    squares, pivot = (read.squares.sum(0), read.pivot[0]) if pool else (read.squares, read.pivot)

    # The sums are rounded relative to their terms, where these are larger than the scores.
    terms = read.squares.maximum(cells.n_cells * torch.as_tensor(size).to(read.squares) ** 2)
    solution = solve(cells, sums, squares=terms, pool=pool)
    offset, parts = fix_gauge(cells, weights, solution, pool=pool)

    # Variation about the mean of all cells: in total, explained by the model, and by each axis alone.
    n_cells = _axis_sums(cells, weights, pool=pool)[1]
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
    spare = n_cells - n_parameters  # residual degrees of freedom; without any, the model fits every matrix
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
    """Compute r² of *given* distance profiles (0: no profile) with the best query and key components for the scores.

    It is ``1 - residual / total``: lower than for queries and keys alone if the profile is worse than none, and NaN
    for a profile with NaN.
    """
    coefficients = read.sums.new_zeros(len(profiles), *read.sums.shape)
    cells.split(coefficients).distance.copy_(profiles.nan_to_num())
    put_in = cells.product(coefficients)
    left = read.sums - put_in
    # The two parts are solved separately, not their difference: after near cancellation, rounding would leave sums
    # that no matrix has.
    of_model = (coefficients * put_in).sum(-1)
    solution = solve(cells, read.sums, squares=read.squares, distances=False)
    solution = solution - solve(cells, put_in, squares=of_model, distances=False)
    residual = read.squares - (coefficients * (read.sums + left)).sum(-1) - (solution * left).sum(-1)
    n_cells, total = (_axis_sums(cells, x, pool=False)[1] for x in (cells.counts, read.sums))
    total = read.squares - total**2 / n_cells
    undefined = (total <= n_cells * (ROUNDING * read.pivot) ** 2) | profiles.isnan().any(-1)
    return torch.where(undefined, torch.nan, 1 - residual.clamp_min(0) / total)


def _axis_sums(cells: Cells, stacked: Tensor, *, pool: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over distances, queries and keys; pooled texts share the distances but not the queries and keys."""
    d, q, k = (x.sum(-1) for x in cells.split(stacked))
    return (d[0], q.sum(0), k.sum(0)) if pool else (d, q, k)


def fix_gauge(
    cells: Cells, weights: Float64[Tensor, "*mask coefficient"], solution: Tensor, *, pool: bool = False
) -> tuple[Float64[Tensor, "*batch"], Parts]:
    """Convert a solution to the intercept and components in the gauge of ``AdditiveFit``.

    Two constants and the straight line ``a[d] + t·d, b[i] − t·i, c[j] + t·j`` change no fitted value. Components get
    mean 0 over the cells, and ``c`` a least-squares slope of 0 over the cells' key positions (of all texts, if pooled).
    """
    numbers = cells.split(weights)
    key = torch.arange(cells.n_key, device=solution.device).double()
    lever = (key - weighted_mean(key, numbers.key)) * numbers.key
    up, down = (lever * cells.split(solution).key).sum(-1, keepdim=True), (lever * key).sum(-1, keepdim=True)
    if pool:
        up, down = (x.expand_as(up).sum(0, keepdim=True) for x in (up, down))
    slope = torch.where(down > 0, up / down, 0.0)
    query = torch.arange(cells.n_query, device=solution.device) + (cells.n_key - cells.n_query)
    line = torch.cat([-cells.distances, query, -key])
    tilted = cells.split(torch.addcmul(solution, slope, line))
    means = [weighted_mean(x, n) for x, n in zip(tilted, numbers, strict=True)]
    # A distance, query or key without cells has no coefficient; report 0.
    parts = ((x - m) * (n > 0) for x, m, n in zip(tilted, means, numbers, strict=True))
    return (means[0] + means[1] + means[2])[..., 0], Parts(*parts)


def weighted_mean(x: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted mean over the last axis, which is kept; 0 where all weights are 0."""
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


def solve(
    cells: Cells,
    marginals: Stacked,
    *,
    squares: Float64[Tensor, "*batch"] | None = None,
    pool: bool = False,
    distances: bool = True,
) -> Stacked:
    """Compute coefficients whose model has the given marginals, up to gauge.

    Args:
        marginals: stacked sums of the (roughly centred) scores; leading axes are independent systems.
        squares: of these scores, summed over the cells: marginals that are small beside them are known only to their
            rounding. None: marginals are exact.
        pool: the systems of the first axis share their distance coefficients; ``marginals`` then are ``pooled``.
        distances: False for queries and keys alone; coefficients of distances are then 0.

    Raises:
        RuntimeError: not converged; says the residual reached.
    """
    weights = pooled(cells, cells.counts.expand_as(marginals)) if pool else cells.counts
    inverse = torch.where(weights > 0, 1 / weights, 0.0)
    if not distances:
        cells.split(inverse).distance.zero_()  # a coefficient that the preconditioner leaves alone stays 0
        marginals = marginals.clone()
        cells.split(marginals).distance.zero_()
    narrow = 0 < cells.high - cells.low < cells.n_query // 4

    def precondition(x: Stacked) -> Stacked:
        return torch.addcmul(_tension(cells, x, pool=pool), x, inverse) if narrow else x * inverse

    def product(x: Stacked) -> Stacked:
        y = cells.product(x)
        if not distances:
            cells.split(y).distance.zero_()
        return pooled(cells, y) if pool else y

    def dot(x: Stacked, y: Stacked) -> Float64[Tensor, "*system 1"]:
        if not pool:
            return (x * y).sum(-1, keepdim=True)
        d, q, k = (part.sum(-1, keepdim=True) for part in cells.split(x * y))
        return d[:1] + (q + k).sum(0, keepdim=True)  # pooled texts are one system with one copy of the distances

    scale = marginals.abs().amax((0, -1) if pool else -1, keepdim=True)
    marginals = marginals / torch.where(scale > 0, scale, 1.0)  # so that no square is too large or too small
    solution, residual = torch.zeros_like(marginals), marginals
    size = dot(residual, precondition(residual))
    if squares is not None:
        norm = OF_SCORES * squares.clamp_min(0).sqrt()[..., None] / torch.where(scale > 0, scale, 1.0)
        size = size.maximum(norm.square().sum(0, keepdim=True) if pool else norm.square())
    tiny = torch.finfo(size.dtype).tiny
    for _ in range(3):
        step, _ = conjugate_gradients(
            product,
            precondition,
            dot,
            residual,
            (AIM**2 * size).clamp_min(tiny),
            most=200 + marginals.shape[-1],
        )
        solution = solution + step
        residual = marginals - product(solution)
        left = dot(residual, precondition(residual))
        if bool((left <= ENOUGH**2 * size).all()):
            break
    reached = float((left / size.clamp_min(tiny)).max().sqrt())
    if not reached <= ACCEPTED:
        raise RuntimeError(
            f"the additive fit has not converged: relative residual {reached:.1e} of the normal equations, "
            f"{ACCEPTED:.0e} needed"
        )
    return solution * scale


def pooled(cells: Cells, stacked: Stacked) -> Stacked:
    """Sum the distance part over the texts (the first axis) and give each text the whole sum."""
    distance, query, key = cells.split(stacked)
    return torch.cat([distance.sum(0, keepdim=True).expand_as(distance), query, key], -1)


def _tension(cells: Cells, x: Stacked, *, pool: bool) -> Stacked:
    """What to add to ``x`` over the diagonal in a window that is narrow beside the length.

    There a smooth function of the position, added to the queries and taken from the keys, hardly changes a cell: its
    energy is that of a stretched string, the integral of the squared slope, which cumulative sums forth and back
    invert. A level and a straight line, which no cell or a change of the distances shows, are left out.
    """
    middle = (cells.low + cells.high) // 2  # on a common grid a key is where the queries are that see it
    at_query, at_key = max(0, cells.offset - middle), max(0, middle - cells.offset)
    queries, keys = slice(at_query, at_query + cells.n_query), slice(at_key, at_key + cells.n_key)
    distance, by_query, by_key = cells.split(x)
    grid = x.new_zeros(*x.shape[:-1], max(queries.stop, keys.stop))
    grid[..., queries] += by_query
    grid[..., keys] -= by_key
    slope = (grid - grid.mean(-1, keepdim=True)).cumsum(-1)
    slope -= slope.mean((0, -1) if pool else -1, keepdim=True)
    smooth = slope.flip(-1).cumsum(-1).flip(-1) / (cells.distances - middle).double().square().sum()
    smooth -= smooth.mean(-1, keepdim=True)
    moved = torch.cat([torch.zeros_like(distance), smooth[..., queries], -smooth[..., keys]], -1)
    return torch.where(cells.counts > 0, moved, 0.0)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    dot: Callable[[Tensor, Tensor], Tensor],
    target: Tensor,
    goal: Tensor,
    *,
    most: int,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Solve ``product(x) = target`` until the residual of every system is small, or rounding has taken over.

    Args:
        product, precondition: multiplication by a positive semidefinite matrix, and by about its inverse.
        dot: inner product of each system (a leading axis of ``target``), which keeps the last axis.
        goal: the squared norm (of ``precondition``) that a residual should come to, in at most ``most`` products.
        allowed: a residual whose entries are all at most these is small enough, too.

    Returns:
        The solution, and for which systems it is one.
    """
    solution, residual = torch.zeros_like(target), target.clone()
    direction = precondition(residual)
    rho = least = dot(residual, direction)
    solved = rho <= goal
    active = ~solved
    for _ in range(most):
        if not bool(active.any()):
            break
        image = product(direction)
        curvature = dot(direction, image)
        # A solved system stands still while others go on: what is left of its residual is rounding, part of it in
        # directions that change nothing, where a step has no bound.
        active = active & (curvature > 0)
        alpha = torch.where(active, rho / curvature, 0.0)
        solution.addcmul_(alpha, direction)
        residual.addcmul_(alpha, image, value=-1)
        z = precondition(residual)
        new = dot(residual, z)
        least = least.minimum(new)
        enough = new <= goal
        if allowed is not None:
            enough = enough | (residual.abs() <= allowed).all(-1, keepdim=True)
        solved = solved | (active & enough)
        active = active & ~enough & (new <= 1e6 * least)
        direction = torch.addcmul(z, torch.where(active, new / rho, 0.0), direction)
        rho = new
    return solution, solved
