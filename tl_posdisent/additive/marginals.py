"""Marginal sums of a score tensor along distances, queries and keys, and its sum of squares, in one pass.

Blocks of a few megabytes are converted to float64 and summed while they are in cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, diagonal_sums
from tl_posdisent.additive.score_checks import refuse_masking_values, refuse_non_finite

_ROWS, _CELLS = 64, 2**18  # that are read at a time, at most, to stay in a processor's cache
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
            stop = min(row + rows, n_query)
            # The keys that these queries can see, and the distance of the block's first cell.
            left = max(0, row + cells.offset - cells.high)
            right = min(n_key, stop + cells.offset - cells.low)
            if left >= right:
                continue
            shift = row + cells.offset - left
            low, high = max(cells.low, shift - (right - left - 1)), min(cells.high, shift + stop - row - 1)
            block = flat[some, row:stop, left:right]
            block = block.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
            block.sub_(pivot[some, None, None])
            inside = cells.inside(slice(row, stop), slice(left, right), masks)
            touched = (~inside).flatten(0, -2).any(0).nonzero()
            if len(touched):  # most columns have no cell to hide
                hidden = slice(int(touched[0]), int(touched[-1]) + 1)
                block[..., hidden].masked_fill_(~inside[..., hidden], 0.0)
            by_distance[some, low - cells.low : high - cells.low + 1] += diagonal_sums(block, low - shift, high - shift)
            by_query[some, row:stop] += block.sum(-1)
            by_key[some, left:right] += block.sum(-2)
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
