"""Least-squares fit of attention scores by a distance, a query and a key component (three-axis additivity).

The fit needs only the marginal sums of the scores (``cells.py``). ``least_squares.py`` solves the normal equations,
``identifiability.py`` chooses one of their solutions, and counts the parameters that they determine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, MaskKind, make_cells
from tl_posdisent.additive.identifiability import design_rank, fix_gauge
from tl_posdisent.additive.least_squares import pooled, solve
from tl_posdisent.additive.marginals import Marginals, read_marginals
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.additive.score_checks import check_pool, read_scores, refuse_patterns, refuse_vectors
from tl_posdisent.utils.validation import check_flag

ROUNDING = 1e-14  # scores that vary by less than this of their size do not vary


@torch.no_grad()
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
            cell counts, shared ``[query, key]`` or one per matrix (broadcast against the leading axes, those of layers
            included). All cells that the model masks must be outside: a value such as -1e9 would be fitted.
        window: keep only cells with ``|distance| < window`` (Mistral's and Gemma's sliding window).
        sinks: leave this many first keys (attention sinks) out of the fit; their importance is 0.
        pool: fit one distance profile to all entries of the first axis (texts), each with its own query and key part.
            Scores of several layers then need that axis: ``(text, head, query, key)`` each.
        check: raise for an attention pattern (rows that are non-negative and sum to 1), and for what looks like q, k,
            v, z or a residual stream (fewer "queries" than "keys", and no causal mask). A square matrix may be scores
            before masking, so it is fitted, also if it is vectors of as many coordinates as rows.

    Returns:
        An ``AdditiveFit``: components with their gauge fixed, ``r``, shares, ``fitted()``, ``residual()``, tables.

    Raises:
        ValueError: scores that are not floating point matrices; a mask of the wrong dtype or size, or without any cell;
            a cell inside the mask that is NaN, infinite or the lowest number of a dtype (the message says where); an
            attention pattern, or vectors, unless ``check=False``.

    Example:
        >>> import torch
        >>> from tl_posdisent import fit_additive
        >>> i = torch.arange(6.0)
        >>> scores = -0.5 * (i[:, None] - i) + torch.tensor([3.0, 0, 0, 1, 0, 0])  # a slope and two high keys
        >>> fit = fit_additive(scores)
        >>> fit
        AdditiveFit of 1 score matrix, 6 queries × 6 keys, 21 cells, 15 parameters
          r 1.000   r² 1.000   adjusted r² 1.000
          alone: distance ...   query ...   key ...
        >>> bool(torch.allclose(fit.fitted(), scores.double().tril()))
        True
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> _, cache = load_demo_model().run_with_cache(demo_tokens(length=32))
        >>> fit_additive(cache).to_frame().groupby("layer")["r"].mean().round(2).tolist()
        [0.55, 0.79, 0.82, 0.84, 0.87]
    """
    scores, layers = read_scores(scores, mask, pool)
    check_flag("check", check)
    check_pool(pool, "scores", scores, 2)
    cells = make_cells(scores.shape, mask, window, sinks=sinks, device=scores.device)
    if check:
        refuse_patterns(
            scores,
            'pass cache["attn_scores", layer]; if that is what was passed, TransformerLens carries the pattern there '
            "for this architecture, and additivity(model, tokens) computes the scores from queries and keys, if it "
            "knows the rotation. check=False fits these values as they are",
        )
        if mask == "causal":
            refuse_vectors(scores, "; check=False fits them unmasked")
    read = read_marginals(scores, cells)
    return replace(fit_marginals(read, cells, pool=pool), layers=layers)


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
    terms = read.squares.maximum(
        cells.n_cells * torch.as_tensor(size, dtype=read.squares.dtype, device=read.squares.device) ** 2
    )
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
    n_parameters = design_rank(cells, len(sums) if pool else None).expand_as(r2)
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
) -> Float64[Tensor, " profile *batch"]:
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
