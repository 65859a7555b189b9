"""The normal equations of the additive model, solved without a matrix.

The three blocks on the diagonal of the normal matrix are diagonal themselves (numbers of cells), and a product with
the rest is cheap (``Cells.product``), so conjugate gradients with the diagonal as preconditioner needs a handful of
O(length) steps; a narrow window needs the preconditioner of ``smooth.py`` too. The system is singular
(see ``gauge.py``) but consistent, which conjugate gradients takes in its stride.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, Runs

# A preconditioner for narrow windows on long sequences.
#
# Cells in a narrow band know little of the level of far-away tokens: raising the query component by a smooth function
# of the position and lowering the key component by the same function hardly changes a fitted value. With the
# diagonal alone as preconditioner, conjugate gradients learns such functions one window width per step. Their energy
# is that of a stretched string, the integral of the squared slope, which a sum over hat functions of widths 1, 2, 4 …
# window widths inverts well, whatever the length (Bramble, Pasciak and Xu, 1990).


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


# Relative size of the residual of the normal equations, in the norm of the preconditioner: what a run of conjugate
# gradients aims at by its own reckoning, what the true residual must then be to need no second run (which would
# only chase rounding), and what is an error if it is still exceeded.
AIM, ENOUGH, ACCEPTED = 1e-13, 1e-12, 1e-10

Stacked = Float64[Tensor, "*batch coefficient"]


def solve(cells: Cells, marginals: Stacked, *, pool: bool = False) -> Stacked:
    """Coefficients whose model has the given marginals, up to gauge.

    Args:
        cells: the cells that count.
        marginals: stacked sums of the (roughly centred) scores; leading axes are independent systems.
        pool: the systems of the first axis share their distance coefficients; ``marginals`` then are ``pooled``.

    Raises:
        RuntimeError: not converged; says the residual reached.
    """
    weights = cells.counts
    if pool:
        weights = pooled(cells, weights.expand(marginals.shape))
    inverse = torch.where(weights > 0, 1 / weights, 0.0)
    correction = smooth_correction(cells)

    def normal(x: Tensor) -> Tensor:
        return pooled(cells, cells.product(x)) if pool else cells.product(x)

    def precondition(x: Tensor) -> Tensor:
        return x * inverse if correction is None else torch.addcmul(correction(x), x, inverse)

    def dot(x: Tensor, y: Tensor) -> Tensor:
        if not pool:
            return (x * y).sum(-1, keepdim=True)
        d, q, k = ((u * v).sum(-1, keepdim=True) for u, v in zip(cells.split(x), cells.split(y), strict=True))
        return d[:1] + (q + k).sum(0, keepdim=True)

    scale = marginals.abs().amax(-1, keepdim=True)
    if pool:
        scale = scale.amax(0, keepdim=True)
    marginals = marginals / torch.where(scale > 0, scale, 1.0)  # so that no square is too large or too small
    solution, residual = torch.zeros_like(marginals), marginals
    size = left = dot(residual, precondition(residual))
    target = (AIM**2 * size).clamp_min(torch.finfo(size.dtype).tiny)
    for _ in range(3):
        step = _conjugate_gradients(normal, precondition, dot, residual, target)
        solution = solution + step
        residual = marginals - normal(solution)
        left = dot(residual, precondition(residual))
        if bool((left <= ENOUGH**2 * size).all()):
            break
    reached = float((left / size.clamp_min(torch.finfo(size.dtype).tiny)).max().sqrt())
    if not reached <= ACCEPTED:
        raise RuntimeError(
            f"the additive fit has not converged: relative residual {reached:.1e} of the normal equations, "
            f"{ACCEPTED:.0e} needed"
        )
    return solution * scale


def pooled(cells: Cells, stacked: Stacked) -> Stacked:
    """The same with the distance part summed over the texts (the first axis), each of which gets the whole sum."""
    distance, query, key = cells.split(stacked)
    return torch.cat([distance.sum(0, keepdim=True).expand_as(distance), query, key], -1)


def _conjugate_gradients(
    normal: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    dot: Callable[[Tensor, Tensor], Tensor],
    marginals: Stacked,
    target: Tensor,
) -> Stacked:
    """Solve until every system's squared residual is below its target, or as long as that may take."""
    solution, residual = torch.zeros_like(marginals), marginals.clone()
    direction = precondition(residual)
    rho = dot(residual, direction)
    best = torch.inf
    for step in range(200 + marginals.shape[-1]):
        image = normal(direction)
        curvature = dot(direction, image)
        # A solved system stands still while others go on: what is left of its residual is rounding, part of it in
        # directions that change no fitted value, where a step has no bound.
        alpha = torch.where((rho > target) & (curvature > 0), rho / curvature, 0.0)
        solution.addcmul_(alpha, direction)
        residual.addcmul_(alpha, image, value=-1)
        z = precondition(residual)
        rho_new = dot(residual, z)
        if step % 4 == 3:  # looking costs a synchronisation on a GPU, so not at every step
            worst = float((rho_new / target).max())
            if worst <= 1 or worst > 1e6 * best:  # done, or rounding has taken over
                break
            best = min(best, worst)
        direction = torch.addcmul(z, torch.where(rho > 0, rho_new / rho, 0.0), direction)
        rho = rho_new
    return solution
