"""Read the marginal sums of scores: over the cells of each distance, query and key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.cells import Cells
from tl_posdisent.additive.score_checks import refuse_non_finite

# The most rows and cells that are read and converted at a time, to stay in the CPU's cache.
_MAX_ROWS, _MAX_CELLS = 64, 2**18
_CELLS_OF_ACCELERATOR = 2**24  # most cells at a time elsewhere: 128 MiB in float64


@dataclass(frozen=True, eq=False)
class Marginals:
    """Sums of ``scores - pivot`` over the cells; the pivot is near the mean, so that squares do not cancel.

    Attributes:
        pivot: number that was subtracted from the scores.
        sums: sums over the cells of each distance, query and key, stacked.
        squares: sum of squares over all cells.
    """

    pivot: Float64[Tensor, "*batch"]
    sums: Float64[Tensor, "*batch coefficient"]
    squares: Float64[Tensor, "*batch"]

    def about(self, pivot: Float64[Tensor, "*batch"], cells: Cells) -> Marginals:
        """Convert the sums to those of ``scores - pivot`` over the same cells, for another pivot."""
        shift = self.pivot - pivot
        total = cells.split(self.sums).query.sum(-1)
        squares = self.squares + shift * (2 * total + cells.n_cells * shift)
        return Marginals(pivot, torch.addcmul(self.sums, cells.counts, shift[..., None]), squares)


def read_marginals(scores: Float[Tensor, "*batch query key"], cells: Cells) -> Marginals:
    """Sum every score matrix over ``cells`` along each axis, in float64.

    Raises:
        ValueError: a cell inside the mask is not finite; the message says where the first one is.
    """
    batch, (n_query, n_key) = scores.shape[:-2], scores.shape[-2:]
    flat, which = scores.reshape(-1, n_query, n_key), None  # flat index of the mask of every matrix, if not shared
    if leading := cells.counts.shape[:-1]:
        which = torch.arange(leading.numel(), device=scores.device).reshape(leading).expand(batch).flatten()
    n = flat.shape[0]
    sums = flat.new_zeros(n, cells.counts.shape[-1], dtype=torch.float64)
    pivot, squares = (flat.new_zeros(n, dtype=torch.float64) for _ in range(2))

    on_cpu = scores.device.type == "cpu"
    at_once = _MAX_CELLS if on_cpu else _CELLS_OF_ACCELERATOR
    rows = min(n_query, max(1, at_once // n_key), _MAX_ROWS if on_cpu else n_query)
    heads = max(1, at_once // (rows * n_key))
    for first in range(0, n, heads):
        of_heads = slice(first, first + heads)
        masks = None if which is None else which[of_heads]
        pivot[of_heads] = _typical(flat[of_heads], cells, masks)
        for row in range(0, n_query, rows):
            lines = slice(row, min(row + rows, n_query))
            columns = cells.columns(lines)
            if columns.start == columns.stop:
                continue
            block = flat[of_heads, lines, columns].to(torch.float64, copy=True, memory_format=torch.contiguous_format)
            block.sub_(pivot[of_heads, None, None])
            inside = cells.inside(lines, columns, masks)
            touched = (~inside).flatten(0, -2).any(0).nonzero()
            if len(touched):  # most columns have no masked cell
                hidden = slice(int(touched[0]), int(touched[-1]) + 1)
                block[..., hidden].masked_fill_(~inside[..., hidden], 0.0)
            cells.add_sums(sums[of_heads], block, lines, columns)
            squares[of_heads] += torch.linalg.vector_norm(block, dim=(-2, -1)).square()
    pivot, sums, squares = pivot.reshape(batch), sums.reshape(*batch, -1), squares.reshape(batch)
    total = cells.split(sums).query.sum(-1)
    refuse_non_finite(scores, cells, squares + pivot * (2 * total + cells.n_cells * pivot))
    return Marginals(pivot, sums, squares)


def _typical(
    x: Float[Tensor, "matrix query key"], cells: Cells, masks: Int64[Tensor, " matrix"] | None
) -> Float64[Tensor, " matrix"]:
    """Estimate the mean of each matrix from a few of its rows, or from all rows if those have no cells."""
    for step in (max(1, cells.n_query // 8), 1):
        rows = slice(0, cells.n_query, step)
        inside = cells.inside(rows, slice(0, cells.n_key), masks)
        count = inside.sum((-2, -1))
        if bool(count.all()):
            break
    mean = x[:, rows].double().masked_fill(~inside, 0.0).sum((-2, -1)) / count
    return torch.where(mean.abs() < 1e30, mean, 0.0)  # what is not finite is reported later
