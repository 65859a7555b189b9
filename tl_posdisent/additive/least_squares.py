"""The normal equations of the additive model, solved by preconditioned conjugate gradients.

No matrix is formed. The three diagonal blocks are diagonal themselves (numbers of cells), and a product with the rest
is cheap (``Cells.product``), so conjugate gradients with the diagonal as preconditioner needs about fifteen O(length)
steps; a narrow window needs ``_tension`` too. The system is singular (see ``fix_gauge`` in ``fit.py``) but consistent,
and conjugate gradients then converges to one of its solutions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells
from tl_posdisent.additive.conjugate_gradients import conjugate_gradients

# Relative size of the residual of the normal equations, in the norm of the preconditioner: what a run of conjugate
# gradients aims at by its own reckoning, what the true residual must then be to need no second run (which would
# only chase rounding), and what is an error if it is still exceeded. They are relative to the marginals, or to a tenth
# of the scores where the marginals are smaller: of scores without an additive part these are
# rounding, which no model has.
AIM, ENOUGH, ACCEPTED, OF_SCORES = 1e-13, 1e-12, 1e-10, 0.1

Stacked = Float64[Tensor, "*batch coefficient"]


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
