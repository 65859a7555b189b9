"""How nearly attention scores are a sum of a distance, a query and a key part (three-axis additivity [A])."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .cells import Cells, MaskKind, make_cells
from .identifiability import count_parameters, fix_gauge
from .marginals import Marginals, check_scores, read_marginals
from .result import AdditiveFit
from .solver import pooled, solve

_ROUNDING = 1e-14  # scores that vary by less than this about their mean do not vary


@torch.no_grad()
def fit_additive(
    scores: Float[Tensor, "*batch query key"],
    *,
    mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
    window: int | None = None,
    pool: bool = False,
) -> AdditiveFit:
    """Fit ``scores[i, j] ≈ intercept + distance[i - j] + query[i] + key[j]`` by least squares, for all heads at once.

    This is the three-axis model of arXiv 2503.13305, §3: how much of what a head's scores do is a sum of *where* (the
    distance), a bias of the query and an importance of the key. Cells outside the mask are never read: they may
    hold anything. Sums run in float64 whatever the dtype; one pass over the scores and about fifteen steps that cost
    O(length) each.

    Args:
        scores: attention logits before the softmax, ``[*batch, query, key]``, e.g. ``cache["attn_scores", 3]``. The
            last query stands at the last key: with fewer queries than keys, query ``i`` is at ``i + n_key - n_query``.
        mask: ``"causal"`` (key not after query), ``"full"`` (bidirectional), or a boolean tensor that is True where a
            cell counts, shared ``[query, key]`` or one per matrix (broadcast against the leading axes).
        window: keep only cells with ``|distance| < window`` (Mistral's and Gemma's sliding window).
        pool: one distance profile for all entries of the first axis (texts), each with its own query and key part.

    Returns:
        An ``AdditiveFit``: components with their gauge fixed, ``r``, shares, ``fitted()``, ``residual()``, tables.

    Raises:
        ValueError: scores of integer type, of less than two axes, empty or with a single key; a mask of wrong dtype
            or size or that leaves nothing; a cell inside the mask that is NaN, infinite or a masking value (says
            where); ``pool`` without a leading axis.

    Example:
        >>> import torch
        >>> from tl_posdisent import fit_additive
        >>> i = torch.arange(6.0)
        >>> scores = -0.5 * (i[:, None] - i) + torch.tensor([3.0, 0, 0, 1, 0, 0])  # a slope and two loud keys
        >>> fit = fit_additive(scores)
        >>> round(fit.r.item(), 6), fit.distances.tolist()
        (1.0, [0, 1, 2, 3, 4, 5])
        >>> bool(torch.allclose(fit.fitted(), scores.double().tril()))
        True
    """
    scores = check_scores(scores).detach()
    if not isinstance(pool, bool):
        raise ValueError(f"pool must be True or False, got {pool!r}")
    if pool and scores.ndim < 3:
        raise ValueError(f"pool=True needs a leading axis of texts, got scores of shape {tuple(scores.shape)}")
    cells = make_cells(scores.shape, mask, window, device=scores.device)
    return fit_marginals(read_marginals(scores, cells), cells, pool=pool)


def fit_marginals(read: Marginals, cells: Cells, *, pool: bool = False) -> AdditiveFit:
    """The fit that belongs to marginal sums, wherever these come from."""
    pivot, sums, squares = read.pivot, read.sums, read.squares
    weights, n_cells = cells.counts, cells.n_cells
    if pool:
        # One pivot for all texts: every sum and square is then about the same number.
        pivot = pivot.mean(0, keepdim=True)
        shift = read.pivot - pivot
        squares = squares + shift * (2 * cells.split(sums).query.sum(-1) + n_cells * shift)
        sums = pooled(cells, torch.addcmul(sums, weights, shift[..., None]))
        weights = pooled(cells, weights.expand_as(sums))
        n_cells, squares = n_cells.expand_as(shift).sum(0), squares.sum(0)

    solution = solve(cells, sums, pool=pool)
    offset, parts = fix_gauge(cells, weights, solution, pool=pool)

    def add_up(stacked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over each axis; pooled texts have their own queries and keys, and the same distances."""
        d, q, k = (x.sum(-1) for x in cells.split(stacked))
        return (d[0], q.sum(0), k.sum(0)) if pool else (d, q, k)

    # Variation about the mean of all cells: in total, explained by the model, and by each axis alone.
    mean = add_up(sums)[0] / n_cells
    total = squares - n_cells * mean**2
    centred = torch.addcmul(sums, weights, mean[..., None], value=-1)
    d, q, k = add_up(solution * centred)
    alone = add_up(torch.where(weights > 0, centred**2 / weights, 0.0))
    level = mean + (pivot[0] if pool else pivot)
    constant = total <= n_cells * (_ROUNDING * level) ** 2

    def share(x: Tensor) -> Tensor:
        return torch.where(constant, torch.nan, (x / total).clamp(0, 1))

    r2 = share(d + q + k)
    n_cells = n_cells.expand_as(r2)
    n_parameters = count_parameters(cells, len(sums) if pool else None).expand_as(r2)
    spare = n_cells - n_parameters
    return AdditiveFit(
        intercept=pivot + offset,
        distance=parts.distance[0] if pool else parts.distance,
        query=parts.query,
        key=parts.key,
        distances=cells.distances,
        r=r2.sqrt(),
        r2=r2,
        r2_adjusted=torch.where(spare > 0, 1 - (1 - r2) * (n_cells - 1) / spare, torch.nan),
        share_distance=share(alone[0]),
        share_query=share(alone[1]),
        share_key=share(alone[2]),
        n_cells=n_cells.long(),
        n_parameters=n_parameters,
        cells=cells,
        pooled=pool,
    )
