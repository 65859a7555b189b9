"""Pearson correlation of two score tensors over the cells of a mask."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.cells import MaskKind, make_cells
from tl_posdisent.additive.fit import ROUNDING, read_marginals
from tl_posdisent.additive.score_checks import check_scores
from tl_posdisent.utils.precision import own_sums
from tl_posdisent.utils.validation import check_devices


@own_sums()
def score_correlation(
    a: Float[Tensor, "*batch query key"],
    b: Float[Tensor, "*batch query key"],
    *,
    mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
    window: int | None = None,
) -> Float64[Tensor, "*batch"]:
    """Correlate two score tensors (Pearson) over the cells of a mask: one number per matrix, in float64.

    Args:
        a, b: scores of the same shape ``[*batch, query, key]``; cells outside the mask are ignored.
        mask, window: as in ``fit_additive``.

    Returns:
        ``[*batch]``, -1 … 1; NaN where one of the two does not vary beyond the rounding of float64.

    Raises:
        ValueError: different shapes, or what ``fit_additive`` refuses.

    Example:
        >>> import torch
        >>> from tl_posdisent.additive import score_correlation
        >>> scores = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))
        >>> score_correlation(scores, 3 - 2 * scores).round(decimals=6).tolist()
        [-1.0, -1.0]
    """
    check_scores(a, "a")
    check_scores(b, "b")
    check_devices(a=a, b=b)
    if a.shape != b.shape:
        raise ValueError(f"a and b must have the same shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    cells = make_cells(a.shape, mask, window, device=a.device)
    inside = cells.to_mask()
    for name, scores in (("a", a), ("b", b)):
        read_marginals(scores, cells, name, suspicious=isinstance(mask, str))  # refuses cells that are no scores
    n = inside.sum((-2, -1))
    centred, sizes = [], []
    for scores in (a, b):
        x = torch.where(inside, scores.detach().double(), 0.0)
        mean = x.sum((-2, -1)) / n
        x = torch.where(inside, x - mean[..., None, None], 0.0)
        size = torch.linalg.vector_norm(x, dim=(-2, -1))
        centred.append(x)
        sizes.append(torch.where(size > ROUNDING * n.sqrt() * mean.abs(), size, torch.nan))  # a mean may be rounded
    return ((centred[0] * centred[1]).sum((-2, -1)) / sizes[0] / sizes[1]).clamp(-1, 1)
