"""Preconditioned conjugate-gradient solver of the normal equations, without a matrix.

The three blocks on the diagonal of the normal matrix are diagonal themselves (numbers of cells), and a product with
the rest is cheap (``Cells.product``), so conjugate gradients with the diagonal as preconditioner needs about fifteen
O(length) steps; a narrow window needs the multilevel preconditioner too. The system is singular (see
``identifiability.py``) but consistent, and conjugate gradients then converges to one of its solutions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, Runs
from tl_posdisent.additive.conjugate_gradients import conjugate_gradients

# Relative size of the residual of the normal equations, in the norm of the preconditioner: what a run of conjugate
# gradients aims at by its own reckoning, what the true residual must then be to need no second run (which would
# only chase rounding), and what is an error if it is still exceeded.
AIM, ENOUGH, ACCEPTED = 1e-13, 1e-12, 1e-10

Stacked = Float64[Tensor, "*batch coefficient"]


def solve(cells: Cells, marginals: Stacked, *, pool: bool = False) -> Stacked:
    """Compute coefficients whose model has the given marginals, up to gauge.

    Args:
        cells: the cells that count.
        marginals: stacked sums of the (roughly centred) scores; leading axes are independent systems.
        pool: the systems of the first axis share their distance coefficients; ``marginals`` then are ``pooled``.

    Raises:
        RuntimeError: not converged; says the residual reached.
    """
    system = _NormalEquations(cells, marginals.shape, pool=pool)
    scale = marginals.abs().amax(-1, keepdim=True)
    if pool:
        scale = scale.amax(0, keepdim=True)
    marginals = marginals / torch.where(scale > 0, scale, 1.0)  # so that no square is too large or too small
    solution, residual = torch.zeros_like(marginals), marginals
    size = left = system.dot(residual, system.precondition(residual))
    tiny = torch.finfo(size.dtype).tiny
    target = (AIM**2 * size).clamp_min(tiny)
    for _ in range(3):
        solution = (
            solution
            + conjugate_gradients(
                system.product,
                system.precondition,
                system.dot,
                residual,
                lambda _: target,
                most=200 + marginals.shape[-1],
                look=4,
            )[0]
        )
        residual = marginals - system.product(solution)
        left = system.dot(residual, system.precondition(residual))
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


class _NormalEquations:
    """The normal matrix of a set of cells as an operator, with its preconditioner."""

    def __init__(self, cells: Cells, shape: torch.Size, *, pool: bool) -> None:
        self.cells, self.pool = cells, pool
        weights = pooled(cells, cells.counts.expand(shape)) if pool else cells.counts
        self.inverse_diagonal = torch.where(weights > 0, 1 / weights, 0.0)
        narrow = isinstance(cells, Runs) and cells.is_narrow and cells.n_distance > 1
        self.multilevel = _MultilevelPreconditioner(cells) if narrow else None

    def product(self, x: Stacked) -> Stacked:
        """Multiply by the normal matrix."""
        y = self.cells.product(x)
        return pooled(self.cells, y) if self.pool else y

    def precondition(self, x: Stacked) -> Stacked:
        """Divide by the diagonal; add the multilevel correction for narrow windows."""
        if self.multilevel is None:
            return x * self.inverse_diagonal
        return torch.addcmul(self.multilevel.correction(x), x, self.inverse_diagonal)

    def dot(self, x: Stacked, y: Stacked) -> Float64[Tensor, "*system 1"]:
        """Inner product of each system; pooled texts are one system and have one copy of the distances."""
        if not self.pool:
            return (x * y).sum(-1, keepdim=True)
        parts = zip(self.cells.split(x), self.cells.split(y), strict=True)
        d, q, k = ((u * v).sum(-1, keepdim=True) for u, v in parts)
        return d[:1] + (q + k).sum(0, keepdim=True)


class _MultilevelPreconditioner:
    """Preconditioner for narrow windows on long sequences.

    Cells in a narrow band hardly fix the level of far-away tokens: raising the query component by a smooth function
    of the position and lowering the key component by the same function hardly changes a fitted value. With the
    diagonal alone as preconditioner, conjugate gradients learns such functions one window width per step. Their energy
    is that of a stretched string, the integral of the squared slope, which a sum over hat functions of widths 1, 2, 4 …
    window widths inverts well, whatever the length (Bramble, Pasciak and Xu, 1990).
    """

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        # On a common grid a query is at its position, and a key where the queries are that see it.
        middle = (cells.low + cells.high) // 2
        self.stiffness = float((cells.distances - middle).double().square().sum())
        query_at, key_at = max(0, cells.offset - middle), max(0, middle - cells.offset)
        self.queries = slice(query_at, query_at + cells.n_query)
        self.keys = slice(key_at, key_at + cells.n_key)
        n_grid = max(self.queries.stop, self.keys.stop)
        self.finest = (cells.n_distance // 2).bit_length() - 1  # log2 of half a hat's width
        self.coarsest = (n_grid - 1).bit_length()
        self.free_directions = _free_directions(cells)

    def correction(self, residual: Stacked) -> Stacked:
        """Compute what to add to the residual divided by the diagonal."""
        _, by_query, by_key = self.cells.split(self._without_free_directions(residual))
        grid = residual.new_zeros(*residual.shape[:-1], 2**self.coarsest + 1)
        grid[..., self.queries] += by_query
        grid[..., self.keys] -= by_key
        levels = [grid]
        while len(levels) <= self.coarsest:
            levels.append(_coarser(levels[-1]))
        smooth = torch.zeros_like(levels[-1])
        for level in reversed(range(self.coarsest + 1)):
            if level >= self.finest:  # a hat of half-width h has slope 1/h at 2h cells of every distance
                smooth = torch.add(smooth, levels[level], alpha=2**level / (2 * self.stiffness))
            if level > 0:
                smooth = _finer(smooth)
        zero = residual.new_zeros(()).expand(*residual.shape[:-1], self.cells.n_distance)
        return self._without_free_directions(torch.cat([zero, smooth[..., self.queries], -smooth[..., self.keys]], -1))

    def _without_free_directions(self, x: Stacked) -> Stacked:
        """Project out a level and a straight line: only rounding errors are there, which would be magnified."""
        for free in self.free_directions:
            x = torch.addcmul(x, (x * free).sum(-1, keepdim=True), free, value=-1)
        return x


def _free_directions(cells: Cells) -> list[Stacked]:
    """Unit vectors of what moves between queries and keys without a change: a level and a straight line."""
    query, key = (torch.arange(n, device=cells.counts.device) for n in (cells.n_query, cells.n_key))
    position = torch.cat([torch.zeros_like(cells.distances), query + cells.offset, key]).double()
    sign = torch.ones_like(position)
    sign[: cells.n_distance], sign[-cells.n_key :] = 0, -1
    level = sign * (cells.counts > 0)
    centre = (level.abs() * position).sum(-1, keepdim=True) / level.abs().sum(-1, keepdim=True)
    return [torch.nn.functional.normalize(x, dim=-1) for x in (level, level * (position - centre))]


def _coarser(x: Tensor) -> Tensor:
    """Sum over hat functions of twice the width, at every other grid point."""
    even, half = x[..., ::2].clone(), x[..., 1::2] / 2
    even[..., :-1] += half
    even[..., 1:] += half
    return even


def _finer(x: Tensor) -> Tensor:
    """Interpolate linearly to twice as many grid points: the transpose of ``_coarser``."""
    between = (x[..., :-1] + x[..., 1:]) / 2
    return torch.cat([torch.stack([x[..., :-1], between], -1).flatten(-2), x[..., -1:]], -1)
