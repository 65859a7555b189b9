"""The normal equations of the additive model, solved without a matrix.

The three blocks on the diagonal of the normal matrix are diagonal themselves (numbers of cells), and a product with
the rest is what ``Cells.marginals_of_model`` computes, so conjugate gradients with the diagonal as preconditioner
needs a handful of O(length) steps. The system is singular (see ``fix_gauge``) but consistent, which conjugate
gradients takes in its stride: it never leaves the range of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from .cells import Cells

# Relative size of the residual of the normal equations, in the norm of the preconditioner: what a run of conjugate
# gradients aims at by its own reckoning, what the true residual must then be to need no second run (which would only
# chase rounding), and what is an error if it is still exceeded.
AIM, ENOUGH, ACCEPTED = 1e-14, 1e-12, 1e-10


@dataclass(frozen=True)
class Parts:
    """One number for each distance, query and key: coefficients, or marginal sums.

    With pooling the distance axis is shared by the texts: ``distance`` then has leading axes ``1 *rest`` where
    ``query`` and ``key`` have ``text *rest``.
    """

    distance: Float64[Tensor, "*a distance"]
    query: Float64[Tensor, "*batch query"]
    key: Float64[Tensor, "*batch key"]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.distance, self.query, self.key))

    def plus(self, factor: Tensor, other: Parts) -> Parts:
        """``self + factor * other``, one factor per system."""
        return Parts(*(x + factor * y for x, y in zip(self, other, strict=True)))

    def over(self, other: Parts) -> Parts:
        """Elementwise ratio, 0 where ``other`` is 0 (an axis value without cells)."""
        return Parts(*(torch.where(y > 0, x / y, 0.0) for x, y in zip(self, other, strict=True)))


def solve(cells: Cells, marginals: Parts, *, pool: bool = False) -> Parts:
    """Coefficients whose model has the given marginals, up to gauge.

    Args:
        cells: the cells that count.
        marginals: sums of the (roughly centred) scores along each axis, float64; leading axes are independent
            systems, except the first with ``pool``, over which the distance sums are already added up.
        pool: one distance profile for all entries of the first leading axis.

    Raises:
        RuntimeError: not converged; says the residual reached.
    """
    weights = count_cells(cells, marginals.query, pool=pool)

    def normal(x: Parts) -> Parts:
        by_distance, by_query, by_key = cells.marginals_of_model(*x)
        return Parts(by_distance.sum(0, keepdim=True) if pool else by_distance, by_query, by_key)

    def dot(x: Parts, y: Parts) -> Tensor:
        d, q, k = ((u * v).sum(-1, keepdim=True) for u, v in zip(x, y, strict=True))
        return d + (q + k).sum(0, keepdim=True) if pool else d + q + k

    solution = Parts(*(torch.zeros_like(x) for x in marginals))
    size = dot(marginals, marginals.over(weights))
    # A long narrow window is a long chain: information travels one window per step, hence the length in the limit.
    limit = 200 + 8 * (cells.n_query + cells.n_key)
    residual, left = marginals, size
    for _ in range(3):
        solution = _conjugate_gradients(normal, dot, weights, solution, residual, AIM**2 * size, limit)
        residual = marginals.plus(torch.full_like(size, -1.0), normal(solution))
        left = dot(residual, residual.over(weights))
        if bool((left <= ENOUGH**2 * size).all()):
            break
    reached = float((left / size.clamp_min(torch.finfo(size.dtype).tiny)).max().sqrt()) if size.numel() else 0.0
    if not reached <= ACCEPTED:
        raise RuntimeError(
            f"the additive fit has not converged: relative residual {reached:.1e} of the normal equations, "
            f"{ACCEPTED:.0e} needed"
        )
    return solution


def _conjugate_gradients(
    normal: Callable[[Parts], Parts],
    dot: Callable[[Parts, Parts], Tensor],
    weights: Parts,
    solution: Parts,
    residual: Parts,
    target: Tensor,
    limit: int,
) -> Parts:
    z = residual.over(weights)
    direction, rho = z, dot(residual, z)
    for step in range(limit):
        image = normal(direction)
        curvature = dot(direction, image)
        # A solved system stands still while others go on: what is left of its residual is rounding, part of it in
        # directions that change no fitted value, where a step has no bound.
        alpha = torch.where((rho > target) & (curvature > 0), rho / curvature, 0.0)
        solution, residual = solution.plus(alpha, direction), residual.plus(-alpha, image)
        z = residual.over(weights)
        rho_new = dot(residual, z)
        # Looking costs a synchronisation on a GPU, so not at every step.
        if step % 4 == 3 and bool((rho_new <= target).all()):
            break
        direction, rho = z.plus(torch.where(rho > 0, rho_new / rho, 0.0), direction), rho_new
    return solution


def fix_gauge(cells: Cells, solution: Parts, *, pool: bool = False) -> tuple[Tensor, Parts]:
    """The intercept, and the same model with components that have mean 0 and a key component without trend.

    Three changes leave every fitted value as it is: two constants that move between the components, and the straight
    line ``a[d] + t·d, b[i] − t·i, c[j] + t·j``. The convention: every component has mean 0 over the cells,
    and the least-squares slope of ``c`` over key positions, weighted by cells, is 0.
    """
    device = solution.query.device
    weights = count_cells(cells, solution.query, pool=pool)
    distance = cells.distances(device).double()
    key = torch.arange(cells.n_key, device=device).double()
    position = key[cells.n_key - cells.n_query :]  # of the queries
    # Slope of the key component, per text …
    centred = key - _mean(key, weights.key)
    up = (weights.key * centred * solution.key).sum(-1, keepdim=True)
    down = (weights.key * centred**2).sum(-1, keepdim=True)
    if pool:  # … or, as the texts share one distance profile, over all of them
        up, down = up.sum(0, keepdim=True), _sum_texts(down, solution.query.shape[0])
    slope = torch.where(down > 0, up / down, 0.0)
    line = Parts(-slope * distance, slope * position, -slope * key)
    tilted = Parts(*(x + y for x, y in zip(solution, line, strict=True)))
    means = [_mean(x, n) for x, n in zip(tilted, weights, strict=True)]
    intercept = sum(means, torch.zeros_like(up))[..., 0]
    # A distance, query or key without cells has no coefficient: it is given as 0.
    centred_parts = ((x - m) * (n > 0) for x, m, n in zip(tilted, means, weights, strict=True))
    return intercept, Parts(*centred_parts)


def count_cells(cells: Cells, like: Tensor, *, pool: bool) -> Parts:
    """Cells per distance (over all texts with ``pool``), query and key, on the device of ``like``."""
    by_distance, by_query, by_key = cells.counts(like.device)
    return Parts(_sum_texts(by_distance, like.shape[0]) if pool else by_distance, by_query, by_key)


def _sum_texts(x: Tensor, n_texts: int) -> Tensor:
    """Sum over the first leading axis, which is absent or 1 where all texts have the same mask."""
    return x * n_texts if x.ndim == 1 else x.sum(0, keepdim=True) * (n_texts // x.shape[0])


def _mean(x: Tensor, weights: Tensor) -> Tensor:
    return (x * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
