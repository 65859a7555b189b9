"""The Toeplitz share of scores: the share of their variance that is a function of the distance."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, MaskKind, make_cells
from tl_posdisent.additive.fit import ROUNDING
from tl_posdisent.additive.marginals import Marginals, read_marginals
from tl_posdisent.additive.score_checks import check_pool, check_scores
from tl_posdisent.utils.precision import own_sums


@own_sums()
def toeplitz_share(
    scores: Float[Tensor, "*batch query key"],
    *,
    mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
    window: int | None = None,
    pool: bool = False,
) -> Float64[Tensor, "*fit"]:
    """Compute the share of the scores' variance that is a function of the distance: 1 for a Toeplitz matrix.

    The share is ``Σ_d n_d (w̄_d - w̄)² / Σ (w - w̄)²``, where ``w̄_d`` is the mean of the ``n_d`` cells at distance d and w̄
    the mean of all cells. It equals ``AdditiveFit.share_distance`` and is computed without the fit, in float64. Under a
    causal mask, scores that depend on the key alone have a share too, because far keys are early keys.

    Args:
        scores: ``[*batch, query, key]``, in any floating dtype.
        mask, window: which cells count, as in ``fit_additive``.
        pool: treat all entries of the first axis (texts) as one set of cells, with one function of the distance.

    Returns:
        ``[*batch]`` (``[*batch]`` less its first axis with ``pool``), 0…1; NaN where the scores do not vary.

    Raises:
        ValueError: as ``fit_additive``, except for what ``check=True`` refuses there.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import toeplitz_share
        >>> i = torch.arange(6.0)
        >>> distance, key = i[:, None] - i, i.expand(6, 6)
        >>> [round(x, 3) for x in toeplitz_share(torch.stack([distance**2, key]), mask="full").tolist()]
        [1.0, 0.5]
    """
    scores = check_scores(scores).detach()
    check_pool(pool, "scores", scores, 2)
    cells = make_cells(scores.shape, mask, window, device=scores.device)
    return _between_distances(read_marginals(scores, cells), cells, pool=pool)


def _between_distances(read: Marginals, cells: Cells, *, pool: bool) -> Float64[Tensor, "*fit"]:
    """Divide the variance between distances by that of all cells, from sums along the diagonals."""
    counts, n = cells.split(cells.counts).distance, cells.n_cells
    if pool:  # sums of each text are moved to one common pivot
        read = read.about(read.pivot.mean(0, keepdim=True).expand_as(read.pivot), cells)
        counts = counts.expand(*read.pivot.shape, -1).sum(0)
        n, read = counts.sum(-1), Marginals(read.pivot[0], read.sums.sum(0), read.squares.sum(0))
    pivot, sums, squares = read.pivot, cells.split(read.sums).distance, read.squares
    mean = sums.sum(-1) / n
    total = squares - n * mean**2
    centred = sums - counts * mean[..., None]
    between = torch.where(counts > 0, centred**2 / counts, 0.0).sum(-1)
    constant = total <= n * (ROUNDING * (mean + pivot)) ** 2
    return torch.where(constant, torch.nan, (between / total).clamp(0, 1))
