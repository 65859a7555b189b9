"""Preconditioned conjugate gradients, and the normal equations of the additive fit, without a matrix.

The three blocks on the diagonal of the normal matrix are diagonal themselves (numbers of cells), and a product with the
rest is cheap (``Cells.product``), so conjugate gradients with the diagonal as preconditioner needs about fifteen
O(length) steps; a narrow window needs ``_tension`` too. The system is singular (see
``fit.fix_gauge``) but consistent, and conjugate gradients then converges to one of its solutions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells

# Relative size of the residual of the normal equations, in the norm of the preconditioner: what a run of conjugate
# gradients aims at by its own reckoning, what the true residual must then be to need no second run (which would
# only chase rounding), and what is an error if it is still exceeded.
AIM, ENOUGH, ACCEPTED = 1e-13, 1e-12, 1e-10

Stacked = Float64[Tensor, "*batch coefficient"]


def solve(cells: Cells, marginals: Stacked, *, pool: bool = False, distances: bool = True) -> Stacked:
    """Compute coefficients whose model has the given marginals, up to gauge.

    Args:
        marginals: stacked sums of the (roughly centred) scores; leading axes are independent systems.
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


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    dot: Callable[[Tensor, Tensor], Tensor],
    target: Tensor,
    goal: Tensor,
    *,
    most: int,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Solve ``product(x) = target`` until the residual of every system is small, or rounding has taken over.

    Args:
        product, precondition: multiplication by a positive semidefinite matrix, and by about its inverse.
        dot: inner product of each system (a leading axis of ``target``), which keeps the last axis.
        goal: the squared norm (of ``precondition``) that a residual should come to, in at most ``most`` products.
        allowed: a residual whose entries are all at most these is small enough, too.

    Returns:
        The solution, and for which systems it is one.
    """
    solution, residual = torch.zeros_like(target), target.clone()
    direction = precondition(residual)
    rho = least = dot(residual, direction)
    solved = rho <= goal
    active = ~solved
    for _ in range(most):
        if not bool(active.any()):
            break
        image = product(direction)
        curvature = dot(direction, image)
        # A solved system stands still while others go on: what is left of its residual is rounding, part of it in
        # directions that change nothing, where a step has no bound.
        active = active & (curvature > 0)
        alpha = torch.where(active, rho / curvature, 0.0)
        solution.addcmul_(alpha, direction)
        residual.addcmul_(alpha, image, value=-1)
        z = precondition(residual)
        new = dot(residual, z)
        least = least.minimum(new)
        enough = new <= goal
        if allowed is not None:
            enough = enough | (residual.abs() <= allowed).all(-1, keepdim=True)
        solved = solved | (active & enough)
        active = active & ~enough & (new <= 1e6 * least)
        direction = torch.addcmul(z, torch.where(active, new / rho, 0.0), direction)
        rho = new
    return solution, solved
