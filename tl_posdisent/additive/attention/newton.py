"""Newton's method for additive attention: find coefficients whose pattern has given marginals.

``Σ_i log Z_i - marginals · coefficients`` is convex, and its gradient is the marginals of the model minus those of the
data. Each step is a sweep of iterative proportional fitting, then Newton's direction by conjugate gradients, with
products from ``AttentionSums`` and the marginals as a diagonal preconditioner, then a line search. The one fall-back
is the preconditioned gradient, where Newton's direction does not descend. Directions that change no pattern (constants,
a straight line) have zero gradient, and no step moves along them.

Systems are solved together, and each is dropped once it is solved. No system raises: if one is not solved after a
limited number of steps, the solution is the best point found, marked as not converged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.attention.sums import AttentionSums, Stacked
from tl_posdisent.additive.attention.systems import Systems
from tl_posdisent.additive.conjugate_gradients import conjugate_gradients

MARGINAL_ERROR = 1e-9
"""Accepted error of a marginal, relative to it, or to one unit of attention if it is smaller. The error of the
divergence is about its square, so this is far below any use of a fit, and far above the rounding of float64."""
CONVERGED_GAP = 1e-10
"""Nats per query: a divergence this close to its minimum, at three successive steps, counts as solved."""
_CELLS_AT_ONCE = 2**23  # number of cells that are solved together: 64 MiB for each pattern that is kept
_LONGEST_SWEEP = 8.0  # most nats by which a sweep changes a coefficient: a larger ratio of marginals is not trusted
_LONGEST_STEP = 8.0  # most nats by which Newton's step changes a coefficient: further away, its parabola says nothing
_MAX_STEPS = 60  # Newton steps; 4 to 10 are enough for 512 tokens of smooth to sharp attention
_MAX_PRODUCTS = 400  # products with the Hessian for one step; a better direction is then cheaper from the next point
_MAX_HALVINGS = 40  # of a step, which is then below the rounding of the coefficients
_DIAGONAL_FLOOR = 1e-3  # lower bound of a diagonal entry, relative to its marginal: p (1 - p) vanishes where p is 1
_DEPENDENT = 1e-12  # eigenvalues of the features' second moments below this times the largest count as 0
_SUFFICIENT_DECREASE = 1e-4  # Armijo's constant: part of the predicted decrease that a step must reach

Coefficients = Float64[Tensor, "system parameter"]
PerSystem = Float64[Tensor, "system 1"]


@dataclass(frozen=True, eq=False)
class Problem:
    """Marginals of the data, and the map from the coefficients of a fit to those of the cells.

    Attributes:
        systems: the cells of each matrix.
        marginals: target of the model; one distance profile applies to all texts of a system.
        features: features of the keys; importances are linear in them, with one direction per system. An empty axis of
            features leaves only the profile; None means one coefficient per key of each text.
        times: how often each query counts; None for once.
    """

    systems: Systems
    marginals: Stacked
    features: Float64[Tensor, "system text key feature"] | None = None
    times: Float64[Tensor, " query"] | None = None

    @property
    def n_distance(self) -> int:
        """Number of coefficients of the distance profile."""
        return self.systems.cells.n_distance

    @cached_property
    def target(self) -> Coefficients:
        """Marginal of the data for each coefficient."""
        return self.reduce(self.marginals)

    @cached_property
    def allowed(self) -> Coefficients:
        """Accepted error of each marginal."""
        features = None if self.features is None else self.features.abs()
        return MARGINAL_ERROR * replace(self, features=features).reduce(self.marginals).clamp_min(1)

    @cached_property
    def n_rows(self) -> PerSystem:
        """Number of queries that have cells."""
        queries = self.systems.queries.expand(*self.marginals.shape[:2], -1).double()
        return (queries if self.times is None else queries * self.times).sum((-2, -1))[:, None]

    def of_one_text(self) -> Problem | None:
        """Return the same problem of one text, if the queries of all texts have the patterns of those of the longest.

        So it is where importances depend on no features but marks of the first keys, and texts differ in length alone.
        """
        systems, features, n_text = self.systems, self.features, self.marginals.shape[1]
        sets, cells = systems.sets, systems.cells
        if features is None or n_text == 1 or not (sets is None or bool((sets == sets[:1]).all())):
            return None
        masks = systems.select(slice(1)).inside(slice(0, cells.n_query), slice(0, cells.n_key))[0]
        masks = masks.expand(n_text, -1, -1)
        queries, longest = masks.any(-1), int(masks.sum((-2, -1)).argmax())
        alike = (features == features[:, longest, None]) | ~masks.any(-2)[..., None]
        if not torch.equal(masks, masks[longest] & queries[..., None]) or not bool(alike.all()):
            return None
        one = replace(systems, sets=None if sets is None else sets[:, longest, None])
        marginals, times = self.marginals.sum(1, keepdim=True), queries.sum(0).double()
        return Problem(one, marginals, features[:, longest, None], times)

    def sums(self, stacked: Stacked) -> AttentionSums:
        """Evaluate the attention with these coefficients of the cells."""
        return AttentionSums(self.systems, stacked, self.times)

    def select(self, which: Int64[Tensor, " chosen"]) -> Problem:
        """Return the problem of some of the systems."""
        features = None if self.features is None else self.features[which]
        return replace(self, systems=self.systems.select(which), marginals=self.marginals[which], features=features)

    def expand(self, x: Coefficients) -> Stacked:
        """Convert coefficients of the fit to coefficients of the cells."""
        n_text, rest = self.marginals.shape[1], x[:, self.n_distance :]
        stacked = x.new_zeros(len(x), *self.marginals.shape[1:])
        by_distance, _, by_key = self.systems.cells.split(stacked)
        by_distance += x[:, None, : self.n_distance]
        if self.features is None:
            by_key += rest.unflatten(-1, (n_text, -1))
        else:
            by_key += torch.einsum("stkf,sf->stk", self.features, rest)
        return stacked

    def reduce(self, stacked: Stacked) -> Coefficients:
        """Apply the transpose of ``expand``."""
        by_distance, _, by_key = self.systems.cells.split(stacked)
        free = self.features is None
        rest = by_key.flatten(1) if free else torch.einsum("stkf,stk->sf", self.features, by_key)
        return torch.cat([by_distance.sum(1), rest], -1)

    def preconditioner(self, sums: AttentionSums) -> Callable[[Coefficients], Coefficients]:
        """Return division by the Hessian's diagonal or, for features, by their second moments weighted with it."""
        diagonal, n = sums.diagonal.maximum(_DIAGONAL_FLOOR * sums.marginals), self.n_distance
        weights = replace(self, features=None).reduce(diagonal)
        inverse = torch.where(weights > 0, 1 / weights, 0.0)
        if self.features is None:
            return lambda x: x * inverse
        by_key = self.systems.cells.split(diagonal).key
        moments = torch.einsum("stkf,stk,stkg->sfg", self.features, by_key, self.features)
        moments_inverse = torch.linalg.pinv(moments, rtol=_DEPENDENT, hermitian=True)

        def divide(x: Coefficients) -> Coefficients:
            of_features = torch.einsum("sfg,sg->sf", moments_inverse, x[:, n:])
            return torch.cat([x[:, :n] * inverse[:, :n], of_features], -1)

        return divide


@dataclass(frozen=True, eq=False)
class Point:
    """Coefficients ``x`` of the fit, and there: coefficients of the cells, sums, objective and gradient."""

    x: Coefficients
    stacked: Stacked
    sums: AttentionSums
    value: PerSystem
    gradient: Coefficients

    @classmethod
    def at(cls, problem: Problem, x: Coefficients) -> Point:
        stacked = problem.expand(x)
        sums = problem.sums(stacked)
        log_z = sums.log_z if problem.times is None else sums.log_z * problem.times
        value = log_z.sum((-2, -1))[:, None] - (stacked * problem.marginals).sum((-2, -1))[:, None]
        return cls(x, stacked, sums, value, problem.reduce(sums.marginals) - problem.target)


class Solution(NamedTuple):
    """Result of Newton's method.

    Attributes:
        coefficients, stacked: coefficients of the fit, and of the cells.
        log_z: logarithm of the normaliser of each query.
        gap: estimate of how far the divergence is above its minimum, in nats per query: half the Newton decrement.
        converged: whether each marginal is within ``MARGINAL_ERROR``, or the gap is below ``CONVERGED_GAP``.
    """

    coefficients: Coefficients
    stacked: Stacked
    log_z: Float64[Tensor, "system text query"]
    gap: Float64[Tensor, " system"]
    converged: Bool[Tensor, " system"]


def solve_attention(problem: Problem) -> Solution:
    """Find coefficients at which the model has the given marginals, unique up to the gauge."""
    n_system, n_text = problem.marginals.shape[:2]
    if (one := problem.of_one_text()) is not None:
        found = solve_attention(one)
        log_z = torch.where(problem.systems.queries, found.log_z, 0.0).expand(-1, n_text, -1)
        return found._replace(stacked=problem.expand(found.coefficients), log_z=log_z)
    cells = problem.systems.cells
    order = torch.arange(n_system, device=problem.marginals.device)
    groups = order.split(max(1, _CELLS_AT_ONCE // (n_text * cells.n_query * cells.n_key)))
    parts = [_solve_together(problem.select(group)) for group in groups]
    return Solution(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _solve_together(problem: Problem) -> Solution:
    x = _begin(problem)
    zero = x.new_zeros(len(x))
    log_z = x.new_zeros(*problem.marginals.shape[:2], problem.systems.cells.n_query)
    solution = Solution(x.clone(), torch.zeros_like(problem.marginals), log_z, zero, zero > 0)
    unsolved = torch.arange(len(x), device=x.device)  # the systems that are not solved yet
    small = x.new_zeros(len(x), 1)  # number of successive steps with a small gap
    for step in range(_MAX_STEPS + 1):
        here = _sweep(problem, x)
        near = (here.gradient.abs() <= problem.allowed).all(-1, keepdim=True)
        direction, gap, solved = _newton_step(problem, here, ~near)
        small = torch.where(solved & (gap <= CONVERGED_GAP), small + 1, 0.0)
        moved = _line_search(problem, here, direction)
        lost = ~here.gradient.isfinite().all(-1, keepdim=True) | (moved == here.x).all(-1, keepdim=True)
        done = (near | (small >= 3) | lost)[:, 0] | (step == _MAX_STEPS)
        which = unsolved[done]
        solution.coefficients[which], solution.stacked[which] = here.x[done], here.stacked[done]
        solution.log_z[which], solution.gap[which] = here.sums.log_z[done], gap[done, 0]
        solution.converged[which] = (near | (solved & (gap <= CONVERGED_GAP)))[done, 0]
        if bool(done.all()):
            break
        x = moved
        if bool(done.any()):
            left = (~done).nonzero()[:, 0]
            problem, unsolved, x, small = problem.select(left), unsolved[left], x[left], small[left]
    return solution


def _begin(problem: Problem) -> Coefficients:
    """Return starting values: logarithms of the marginals relative to those of uniform attention; 0 for features."""
    target = problem.target
    uniform = problem.reduce(problem.sums(torch.zeros_like(problem.marginals)).marginals)
    start = torch.where(target > 0, (target / uniform).log(), 0.0)
    if problem.features is not None:
        start[:, problem.n_distance :] = 0
    return start


def _sweep(problem: Problem, x: Coefficients) -> Point:
    """Run one sweep of iterative proportional fitting: match the marginals of the distances, then of the keys.

    This never raises the objective. Newton's method by itself overshoots by orders of magnitude where a coefficient
    is so low that the model's marginal is far below the data's.
    """
    here = Point.at(problem, x)
    groups = [slice(0, problem.n_distance)]
    groups += [slice(problem.n_distance, None)] if problem.features is None else []
    for group in groups:  # of coefficients, at most one per cell
        target, gradient = problem.target[:, group], here.gradient[:, group]
        ratio = target.clamp_min(1e-300).log() - (target + gradient).clamp_min(1e-12).log()
        x = here.x.clone()
        informed = (target > 0) | (gradient > problem.allowed[:, group])
        x[:, group] += torch.where(informed, ratio.clamp(-_LONGEST_SWEEP, _LONGEST_SWEEP), 0.0)
        here = Point.at(problem, x)
    return here


def _line_search(problem: Problem, here: Point, step: Coefficients) -> Coefficients:
    """Halve the step of each system until it lowers the objective sufficiently; keep the point if no step does."""
    slope = (here.gradient * step).sum(-1, keepdim=True)
    rounding = 1e-11 * here.value.abs().clamp_min(1)
    longest = problem.expand(step).abs().amax((-2, -1))[:, None]
    moved, length = here.x.clone(), (_LONGEST_STEP / longest).clamp_max(1)
    left = (slope[:, 0] != 0).nonzero()[:, 0]  # the systems that search
    for _ in range(_MAX_HALVINGS):
        if not len(left):
            break
        part = problem if len(left) == len(moved) else problem.select(left)
        there = Point.at(part, here.x[left] + length[left] * step[left])
        expected = _SUFFICIENT_DECREASE * length[left] * slope[left]
        enough = (there.value <= here.value[left] + expected + rounding[left])[:, 0]
        moved[left[enough]] = there.x[enough]
        left, length = left[~enough], length / 2
    return moved


def _newton_step(
    problem: Problem, here: Point, active: Bool[Tensor, "system 1"]
) -> tuple[Coefficients, PerSystem, Bool[Tensor, "system 1"]]:
    """Compute the step of each active system, the gap that it closes, and whether it solves Newton's equation."""
    precondition = problem.preconditioner(here.sums)
    norm = (here.gradient * precondition(here.gradient)).sum(-1, keepdim=True)
    size = (norm / problem.n_rows).sqrt()
    step, solved = conjugate_gradients(
        lambda x: problem.reduce(here.sums.product(problem.expand(x))),
        precondition,
        lambda x, y: (x * y).sum(-1, keepdim=True),
        torch.where(active, -here.gradient, 0.0),
        norm * size.clamp(1e-6, 0.1) ** 2,
        most=min(_MAX_PRODUCTS, 50 + here.x.shape[-1]),
        allowed=problem.allowed / 4,  # smaller residuals would be rounding
    )
    decrement = -(here.gradient * step).sum(-1, keepdim=True) / problem.n_rows
    failed = active & ~(decrement > 0)  # by rounding, where the pattern is practically 0 or 1 everywhere
    step = torch.where(failed, -precondition(here.gradient), step)
    gap = torch.where(active, decrement, size.square()) / 2
    return step, gap.masked_fill(failed, torch.inf), solved & ~failed
