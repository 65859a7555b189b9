"""Toeplitz share of scores, singular spectrum of ``q kᵀ``, and principal angles between subspaces."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, Marginals, MaskKind, make_cells, read_marginals
from tl_posdisent.additive.fit import ROUNDING
from tl_posdisent.additive.score_checks import check_scores
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import own_sums
from tl_posdisent.utils.validation import check_devices, check_flag, check_values, described


@own_sums()
def toeplitz_share(
    scores: Float[Tensor, "*batch query key"],
    *,
    mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
    window: int | None = None,
    pool: bool = False,
) -> Float64[Tensor, "*fit"]:
    """Compute the share of the scores' variance that is a function of the distance: 1 for a Toeplitz matrix.

    With ``w̄_d`` the mean of the ``n_d`` cells at distance d, and w̄ that of all: ``Σ_d n_d (w̄_d - w̄)² / Σ (w - w̄)²``.
    It is ``AdditiveFit.share_distance`` without the fit, in float64. Under a causal mask a score that depends on the
    key alone has a share too: far keys are early keys.

    Args:
        scores: ``[*batch, query, key]``, in any floating dtype.
        mask, window: which cells count, as in ``fit_additive``.
        pool: take all entries of the first axis (texts) as one, with one function of the distance.

    Returns:
        ``[*batch]`` (``[*batch]`` less its first axis with ``pool``), 0…1; NaN where the scores do not vary.

    Raises:
        ValueError: as ``fit_additive``, but for what its ``check`` refuses.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import toeplitz_share
        >>> i = torch.arange(6.0)
        >>> distance, key = i[:, None] - i, i.expand(6, 6)
        >>> [round(x, 3) for x in toeplitz_share(torch.stack([distance**2, key]), mask="full").tolist()]
        [1.0, 0.5]
    """
    scores = check_scores(scores).detach()
    check_flag("pool", pool)
    if pool and scores.ndim < 3:
        raise ValueError(f"pool=True needs a leading axis of texts, got scores of shape {tuple(scores.shape)}")
    cells = make_cells(scores.shape, mask, window, device=scores.device)
    return _between_distances(read_marginals(scores, cells, suspicious=isinstance(mask, str)), cells, pool=pool)


def _between_distances(read: Marginals, cells: Cells, *, pool: bool) -> Float64[Tensor, "*fit"]:
    """Divide the variance between distances by that of all cells, from sums along the diagonals."""
    counts, n = cells.split(cells.counts).distance, cells.n_cells
    if pool:  # the pivot of each text becomes that of all
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


def product_spectrum(
    q: Float[Tensor, "*batch query d"], k: Float[Tensor, "*batch key d"]
) -> Float64[Tensor, "*batch rank"]:
    """Compute the singular values of ``q kᵀ``, descending, without forming it; those left out are 0."""
    triangles = [torch.linalg.qr(x.double(), mode="r").R for x in (q, k)]
    spectrum: Tensor = torch.linalg.svdvals(triangles[0] @ triangles[1].mT)
    return spectrum


def condition_number(spectrum: Float64[Tensor, "*batch rank"]) -> Float64[Tensor, "*batch"]:
    """Divide the largest singular value by the smallest; infinite if that is 0 to rounding."""
    largest, smallest = spectrum[..., 0], spectrum[..., -1]
    zero = smallest <= largest * torch.finfo(torch.float64).eps * spectrum.shape[-1]
    return torch.where(zero, torch.inf, largest / smallest)


def effective_rank(spectrum: Float64[Tensor, "*batch rank"]) -> Float64[Tensor, "*batch"]:
    """Compute ``exp`` of the entropy of the singular values over their sum. NaN if all are 0."""
    p = spectrum / spectrum.sum(-1, keepdim=True)
    rank: Tensor = torch.special.entr(p).sum(-1).exp()
    return rank


def principal_angles(a: Float[Tensor, "d m"], b: Float[Tensor, "d n"]) -> Float64[Tensor, "angle"]:
    """Compute the principal angles between two subspaces, each spanned by the columns of a matrix.

    Angles below 45° come from their sines, the others from their cosines (Knyazev and Argentati, SIAM J. Sci. Comput.
    23, 2002), which keeps all digits.

    Args:
        a, b: ``[d, m]`` and ``[d, n]``; the columns need be neither orthogonal nor independent.

    Returns:
        ``min`` of the two ranks, in radians from 0 to π/2, the largest first; float64.

    Raises:
        ValueError: no matrices of floating point with equally long columns; columns that are not finite or all 0.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import principal_angles
        >>> x, y, z = torch.eye(3)
        >>> principal_angles(torch.stack([x, y], 1), torch.stack([x, y + z], 1)).rad2deg().round().tolist()
        [45.0, 0.0]
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != 2 or x.shape[0] != a.shape[0]:
            raise ArgumentError(
                name, f"must be floating point of shape (d, columns), the same d for both, got {described(x)}"
            )
        check_values(name, x)
        if not bool(x.isfinite().all()) or not bool((x != 0).any()):
            raise ArgumentError(name, "must be finite and not all 0")
    check_devices(a=a, b=b)
    bases = []
    for x in (a, b):
        u, s, _ = torch.linalg.svd(x.double(), full_matrices=False)
        precision = max(torch.finfo(x.dtype).eps, torch.finfo(torch.float64).eps)
        bases.append(u[:, s > s[0] * precision * max(x.shape)])
    one, other = bases
    if one.shape[1] < other.shape[1]:
        one, other = other, one
    product = one.T @ other
    cosines = torch.linalg.svdvals(product).clamp(max=1).flip(0)
    sines = torch.linalg.svdvals(other - one @ product).clamp(max=1)
    return torch.where(cosines**2 < 0.5, cosines.acos(), sines.asin())
