"""A preconditioner for narrow windows on long sequences.

Cells in a narrow band know little of the level of far-away tokens: raising the query component by a smooth function
of the position and lowering the key component by the same function hardly changes a fitted value. With the
diagonal alone as preconditioner, conjugate gradients learns such functions one window width per step. Their energy
is that of a stretched string, the integral of the squared slope, which a sum over hat functions of widths 1, 2, 4 …
window widths inverts well, whatever the length (Bramble, Pasciak and Xu, 1990).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cells import Cells
from .interval_cells import Runs


def smooth_correction(cells: Cells) -> Callable[[Tensor], Tensor] | None:
    """What to add to a residual that is divided by the diagonal; None where that alone does well."""
    width = cells.n_distance
    if not (isinstance(cells, Runs) and cells.is_narrow) or width == 1:
        return None
    # On a common grid a query is at its position, and a key where the queries are that see it.
    middle = (cells.low + cells.high) // 2
    stiffness = float((cells.distances - middle).double().square().sum())
    query_at, key_at = max(0, cells.offset - middle), max(0, middle - cells.offset)
    n_grid = max(query_at + cells.n_query, key_at + cells.n_key)
    finest, coarsest = (width // 2).bit_length() - 1, (n_grid - 1).bit_length()  # log2 of half a hat's width
    project = _without_free_directions(cells)

    def correct(residual: Tensor) -> Tensor:
        _, by_query, by_key = cells.split(project(residual))
        grid = residual.new_zeros(*residual.shape[:-1], 2**coarsest + 1)
        grid[..., query_at : query_at + cells.n_query] += by_query
        grid[..., key_at : key_at + cells.n_key] -= by_key
        levels = [grid]
        while len(levels) <= coarsest:
            levels.append(_coarser(levels[-1]))
        smooth = torch.zeros_like(levels[-1])
        for level in reversed(range(coarsest + 1)):
            if level >= finest:  # a hat of half-width h has slope 1/h at 2h cells of every distance
                smooth = torch.add(smooth, levels[level], alpha=2**level / (2 * stiffness))
            if level > 0:
                smooth = _finer(smooth)
        zero = residual.new_zeros(()).expand(*residual.shape[:-1], width)
        of_query = smooth[..., query_at : query_at + cells.n_query]
        of_key = smooth[..., key_at : key_at + cells.n_key]
        return project(torch.cat([zero, of_query, -of_key], -1))

    return correct


def _without_free_directions(cells: Cells) -> Callable[[Tensor], Tensor]:
    """Take out what moves between the components: a level and a straight line.

    Nothing but rounding errors point there, and the correction would blow these up.
    """
    query, key = (torch.arange(n, device=cells.counts.device) for n in (cells.n_query, cells.n_key))
    position = torch.cat([torch.zeros_like(cells.distances), query + cells.offset, key]).double()
    sign = torch.ones_like(position)
    sign[: cells.n_distance], sign[-cells.n_key :] = 0, -1
    level = sign * (cells.counts > 0)
    centre = (level.abs() * position).sum(-1, keepdim=True) / level.abs().sum(-1, keepdim=True)
    directions = [torch.nn.functional.normalize(x, dim=-1) for x in (level, level * (position - centre))]

    def project(x: Tensor) -> Tensor:
        for free in directions:
            x = torch.addcmul(x, (x * free).sum(-1, keepdim=True), free, value=-1)
        return x

    return project


def _coarser(x: Tensor) -> Tensor:
    """Sums over hat functions of twice the width, at every other grid point."""
    even, half = x[..., ::2].clone(), x[..., 1::2] / 2
    even[..., :-1] += half
    even[..., 1:] += half
    return even


def _finer(x: Tensor) -> Tensor:
    """The transpose: linear interpolation to twice as many grid points."""
    between = (x[..., :-1] + x[..., 1:]) / 2
    return torch.cat([torch.stack([x[..., :-1], between], -1).flatten(-2), x[..., -1:]], -1)
