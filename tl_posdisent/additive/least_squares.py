"""Solve the normal equations of the additive model by preconditioned conjugate gradients.

No matrix is formed. The three blocks on the diagonal are diagonal matrices (numbers of cells), and a product with the
other blocks is cheap (``Cells.product``). With the diagonal as preconditioner, conjugate gradients needs about fifteen
O(length) steps; a narrow window needs ``_tension`` in the preconditioner as well. The system is singular (see
``fix_gauge`` in ``identifiability.py``) but consistent, and conjugate gradients converges to one of its solutions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells
from tl_posdisent.additive.conjugate_gradients import conjugate_gradients

# Bounds on the residual of the normal equations, in the norm of the preconditioner. They are relative to the marginals,
# or to a tenth of the scores where the marginals are smaller: for scores without an additive part the marginals are
# rounding, which no model can fit.
_RESIDUAL_OF_RUN = 1e-13  # ends a run of conjugate gradients, by its recurrence for the residual
_RESIDUAL_OF_SOLUTION = 1e-12  # the true residual at which a further run would only reduce rounding
_ACCEPTED_RESIDUAL = 1e-10  # more than this after the last run is an error
_PART_OF_SCORES = 0.1

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
        squares: sums over the cells of these scores squared: marginals that are small compared with them are known only
            up to rounding. None: the marginals are exact.
        pool: whether the systems of the first axis share their distance coefficients; ``marginals`` must then be
            ``pooled``.
        distances: False to fit queries and keys alone, with distance coefficients of 0.

    Raises:
        RuntimeError: no convergence; the error states the residual.
    """
    weights = pooled(cells, cells.counts.expand_as(marginals)) if pool else cells.counts
    inverse = torch.where(weights > 0, 1 / weights, 0.0)
    if not distances:
        cells.split(inverse).distance.zero_()  # a coefficient that the preconditioner sets to 0 stays 0
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
        return d[:1] + (q + k).sum(0, keepdim=True)  # pooled texts are one system, which has the distances once

    scale = marginals.abs().amax((0, -1) if pool else -1, keepdim=True)
    marginals = marginals / torch.where(scale > 0, scale, 1.0)  # so that squares neither overflow nor underflow
    solution, residual = torch.zeros_like(marginals), marginals
    size = dot(residual, precondition(residual))
    if squares is not None:
        norm = _PART_OF_SCORES * squares.clamp_min(0).sqrt()[..., None] / torch.where(scale > 0, scale, 1.0)
        size = size.maximum(norm.square().sum(0, keepdim=True) if pool else norm.square())
    tiny = torch.finfo(size.dtype).tiny
    for _ in range(3):
        step, _ = conjugate_gradients(
            product,
            precondition,
            dot,
            residual,
            (_RESIDUAL_OF_RUN**2 * size).clamp_min(tiny),
            most=200 + marginals.shape[-1],
        )
        solution = solution + step
        residual = marginals - product(solution)
        left = dot(residual, precondition(residual))
        if bool((left <= _RESIDUAL_OF_SOLUTION**2 * size).all()):
            break
    reached = float((left / size.clamp_min(tiny)).max().sqrt())
    if not reached <= _ACCEPTED_RESIDUAL:
        raise RuntimeError(
            f"the additive fit has not converged: relative residual {reached:.1e} of the normal equations, "
            f"{_ACCEPTED_RESIDUAL:.0e} needed"
        )
    return solution * scale


def pooled(cells: Cells, stacked: Stacked) -> Stacked:
    """Sum the distance part over the texts (the first axis) and give each text the whole sum."""
    distance, query, key = cells.split(stacked)
    return torch.cat([distance.sum(0, keepdim=True).expand_as(distance), query, key], -1)


def _tension(cells: Cells, x: Stacked, *, pool: bool) -> Stacked:
    """Compute what the preconditioner adds to the diagonal's result in a window much narrower than the text.

    There, a smooth function of the position that is added to the queries and subtracted from the keys hardly changes a
    cell. Its energy is that of a stretched string, the integral of the squared slope, which two cumulative sums (one
    forwards, one backwards) invert. Its constant, which changes no cell, and its straight line, which the distances can
    express, are removed.
    """
    middle = (cells.low + cells.high) // 2  # places each key on the grid of the queries that see it
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
