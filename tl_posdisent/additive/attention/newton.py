"""Newton's method for additive attention: find coefficients whose pattern has given marginals.

``Σ_i log Z_i - marginals · coefficients`` is convex, and its gradient is the marginals of the model minus those of the
data. Each step is solved by conjugate gradients, with products from ``AttentionSums`` and the marginals as a diagonal
preconditioner or, if these do not converge and the problem is small, by a Cholesky factor of the Hessian. Directions
that change no pattern (constants, a straight line) have zero gradient, and no step moves along them.

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

from tl_posdisent.additive.attention.sums import AttentionSums, Layout, Stacked
from tl_posdisent.additive.conjugate_gradients import conjugate_gradients

_AT_ONCE = 2**14  # number of keys (of all texts of all systems) that are solved together
AIM = 1e-9  # accepted error, relative to the marginal, or to one unit of attention if the marginal is smaller
GAP = 1e-10  # nats per query: a divergence this close to its minimum counts as solved
_LONGEST = 8.0  # most nats by which a sweep changes a coefficient
_MAX_STEPS, _MAX_PRODUCTS, _MAX_HALVINGS = 60, 400, 40
_DENSE = 2**26  # largest product of cells and coefficients for which a system's Hessian is formed
_LEAST = 1e-3  # lower bound of a diagonal entry, relative to its marginal
_NEGLIGIBLE = 1e-12  # eigenvalues of the features' second moments below this times the largest count as 0

Coefficients = Float64[Tensor, "system parameter"]
PerSystem = Float64[Tensor, "system 1"]


@dataclass(frozen=True, eq=False)
class Problem:
    """Marginals of the data, and the map from the coefficients of a fit to those of the cells.

    Attributes:
        marginals: target of the model; one distance profile applies to all texts of a system.
        distance: whether the fit has a distance profile.
        features: features of the keys; importances are linear in them, with one direction per system and band. An empty
            axis of features leaves only the profile; None means one coefficient per key of each text.
        aim: accepted relative error of each marginal. The error of the objective is then about its square.
    """

    layout: Layout
    marginals: Stacked
    distance: bool = True
    features: Float64[Tensor, "system text key feature"] | None = None
    aim: float = AIM

    @property
    def n_profile(self) -> int:
        """Number of coefficients of the distance profile."""
        return self.layout.n_distance if self.distance else 0

    @cached_property
    def target(self) -> Coefficients:
        """Marginal of the data for each coefficient."""
        return self.reduce(self.marginals)

    @cached_property
    def allowed(self) -> Coefficients:
        """Accepted error of each marginal."""
        features = None if self.features is None else self.features.abs()
        return self.aim * replace(self, features=features).reduce(self.marginals).clamp_min(1)

    @cached_property
    def n_rows(self) -> PerSystem:
        """Number of queries that have cells."""
        return self.layout.queries.expand(*self.marginals.shape[:2], -1).sum((-2, -1))[:, None].double()

    def select(self, which: Int64[Tensor, " chosen"]) -> Problem:
        features = None if self.features is None else self.features[which]
        layout, marginals = self.layout.select(which), self.marginals[which]
        return replace(self, layout=layout, marginals=marginals, features=features)

    def expand(self, x: Coefficients) -> Stacked:
        """Convert coefficients of the fit to coefficients of the cells."""
        layout, n, n_text = self.layout, len(x), self.marginals.shape[1]
        by_distance = x.new_zeros(n, n_text, layout.n_distance)
        if self.distance:
            by_distance = by_distance + x[:, None, : self.n_profile]
        rest = x[:, self.n_profile :]
        if self.features is not None:
            rest = torch.einsum("stkf,sbf->stbk", self.features, rest.unflatten(-1, (layout.n_band, -1)))
        return torch.cat([by_distance, rest.reshape(n, n_text, -1)], -1)

    def reduce(self, stacked: Stacked) -> Coefficients:
        """Apply the transpose of ``expand``."""
        by_distance, by_key = self.layout.split(stacked)
        parts = [by_distance.sum(1)] if self.distance else []
        if self.features is not None:
            parts.append(torch.einsum("stkf,stbk->sbf", self.features, by_key).flatten(1))
        else:
            parts.append(by_key.flatten(1))
        return torch.cat(parts, -1)

    def preconditioner(self, sums: AttentionSums) -> Callable[[Coefficients], Coefficients]:
        """Return division by the Hessian's diagonal or, for features, by their second moments weighted with it."""
        diagonal = sums.diagonal.maximum(_LEAST * sums.marginals)
        weights = replace(self, features=None).reduce(diagonal)
        inverse = torch.where(weights > 0, 1 / weights, 0.0)
        n, n_band = self.n_profile, self.layout.n_band
        if self.features is None:
            return lambda x: x * inverse[:, : x.shape[-1]]
        by_key = self.layout.split(diagonal)[1]
        moments = torch.einsum("stkf,stbk,stkg->sbfg", self.features, by_key, self.features)
        moments_inverse = torch.linalg.pinv(moments, rtol=_NEGLIGIBLE, hermitian=True)

        def divide(x: Coefficients) -> Coefficients:
            of_features = torch.einsum("sbfg,sbg->sbf", moments_inverse, x[:, n:].unflatten(-1, (n_band, -1)))
            return torch.cat([x[:, :n] * inverse[:, :n], of_features.flatten(1)], -1)

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
        sums = AttentionSums(problem.layout, stacked)
        value = sums.log_z.sum((-2, -1))[:, None] - (stacked * problem.marginals).sum((-2, -1))[:, None]
        return cls(x, stacked, sums, value, problem.reduce(sums.marginals) - problem.target)


class Solution(NamedTuple):
    """Result of Newton's method.

    Attributes:
        coefficients, stacked: coefficients of the fit, and of the cells.
        log_z: logarithm of the normaliser of each query.
        gap: estimate of how far the divergence is above its minimum, in nats per query: half the Newton decrement.
        converged: whether each marginal is within ``Problem.aim``, or the gap is below ``GAP``.
    """

    coefficients: Coefficients
    stacked: Stacked
    log_z: Float64[Tensor, "system text query"]
    gap: Float64[Tensor, " system"]
    converged: Bool[Tensor, " system"]


def solve_attention(problem: Problem) -> Solution:
    """Find coefficients at which the model has the given marginals, unique up to the gauge."""
    n_system, n_text = problem.marginals.shape[:2]
    order = torch.arange(n_system, device=problem.marginals.device)
    groups = order.split(max(1, _AT_ONCE // (n_text * problem.layout.n_key)))
    parts = [_solve_together(problem.select(some)) for some in groups]
    return Solution(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _solve_together(problem: Problem) -> Solution:
    x = _begin(problem)
    zero = x.new_zeros(len(x))
    log_z = x.new_zeros(*problem.marginals.shape[:2], problem.layout.n_query)
    found = Solution(x.clone(), torch.zeros_like(problem.marginals), log_z, zero, zero > 0)
    open_ = torch.arange(len(x), device=x.device)  # the systems that are not solved yet
    small = x.new_zeros(len(x), 1)  # number of successive steps with a small gap
    for step in range(_MAX_STEPS + 1):
        here = _sweep(problem, x)
        near = (here.gradient.abs() <= problem.allowed).all(-1, keepdim=True)
        direction, gap, solved = _newton_step(problem, here, ~near)
        small = torch.where(solved & (gap <= GAP), small + 1, 0.0)
        moved = _line_search(problem, here, direction)
        lost = ~here.gradient.isfinite().all(-1, keepdim=True) | (moved == here.x).all(-1, keepdim=True)
        done = (near | (small >= 3) | lost)[:, 0] | (step == _MAX_STEPS)
        which = open_[done]
        found.coefficients[which], found.stacked[which] = here.x[done], here.stacked[done]
        found.log_z[which], found.gap[which] = here.sums.log_z[done], gap[done, 0]
        found.converged[which] = (near | (solved & (gap <= GAP)))[done, 0]
        if bool(done.all()):
            break
        x = moved
        if bool(done.any()):
            left = (~done).nonzero()[:, 0]
            problem, open_, x, small = problem.select(left), open_[left], x[left], small[left]
    return found


def _begin(problem: Problem) -> Coefficients:
    """Return starting values: logarithms of the marginals relative to those of uniform attention; 0 for features."""
    target = problem.target
    uniform = problem.reduce(AttentionSums(problem.layout, torch.zeros_like(problem.marginals)).marginals)
    start = torch.where(target > 0, (target / uniform).log(), 0.0)
    if problem.features is not None:
        start[:, problem.n_profile :] = 0
    return start


def solve_keys_alone(layout: Layout, marginals: Stacked) -> tuple[Stacked, Float64[Tensor, "system text query"]]:
    """Solve in closed form without a profile, where each query sees all keys up to its own (``layout.is_causal``).

    Let ``T_j`` be the attention from the queries at or after position j to the keys up to j: the number of these
    queries minus the attention that later keys get. Key j gets the fraction ``m_j / T_j`` of it from each of these
    queries. A normaliser over keys up to j - 1 is therefore the one over keys up to j times ``1 - m_j / T_j``, and the
    importance of key j is the logarithm of its fraction of the normaliser.

    Returns:
        Coefficients of the cells, and logarithms of the normalisers.
    """
    by_key = layout.split(marginals)[1][..., 0, :]
    queries = torch.nn.functional.pad(layout.queries.to(by_key), (layout.offset, 0))
    total = (queries - by_key).flip(-1).cumsum(-1).flip(-1) + by_key
    part = (by_key / total).nan_to_num(nan=0.0).clamp(1e-300, 1 - torch.finfo(by_key.dtype).eps)
    others = torch.log1p(-part).flip(-1).cumsum(-1).flip(-1)
    log_z = torch.nn.functional.pad(others[..., 1:], (0, 1))
    importance = torch.where(by_key > 0, part.log() + log_z, 0.0)
    stacked = torch.nn.functional.pad(importance, (layout.n_distance, 0))
    return stacked, log_z[..., layout.offset :] * layout.queries


def _sweep(problem: Problem, x: Coefficients) -> Point:
    """Run one sweep of iterative proportional fitting: match the marginals of the distances, then of the keys.

    This never raises the objective. Newton's method by itself overshoots by orders of magnitude where a coefficient
    is so low that the model's marginal is far below the data's.
    """
    here = Point.at(problem, x)
    groups = [slice(0, problem.n_profile)] if problem.distance else []
    groups += [slice(problem.n_profile, None)] if problem.features is None else []
    for group in groups:  # of coefficients, at most one per cell
        target, gradient = problem.target[:, group], here.gradient[:, group]
        ratio = target.clamp_min(1e-300).log() - (target + gradient).clamp_min(1e-12).log()
        x = here.x.clone()
        told = (target > 0) | (gradient > problem.allowed[:, group])
        x[:, group] += torch.where(told, ratio.clamp(-_LONGEST, _LONGEST), 0.0)
        here = Point.at(problem, x)
    return here


def _line_search(problem: Problem, here: Point, step: Coefficients) -> Coefficients:
    """Halve the step of each system until it lowers the objective sufficiently; keep the point if no step does."""
    slope = (here.gradient * step).sum(-1, keepdim=True)
    rounding = 1e-11 * here.value.abs().clamp_min(1)
    moved, length = here.x.clone(), 1.0
    left = (slope[:, 0] != 0).nonzero()[:, 0]  # the systems that search
    for _ in range(_MAX_HALVINGS):
        if not len(left):
            break
        part = problem if len(left) == len(moved) else problem.select(left)
        there = Point.at(part, torch.add(here.x[left], step[left], alpha=length))
        enough = (there.value <= here.value[left] + 1e-4 * length * slope[left] + rounding[left])[:, 0]
        moved[left[enough]] = there.x[enough]
        left, length = left[~enough], length / 2
    return moved


def _newton_step(
    problem: Problem, here: Point, wanted: Bool[Tensor, "system 1"]
) -> tuple[Coefficients, PerSystem, Bool[Tensor, "system 1"]]:
    """Compute the step of each wanted system, the gap that it closes, and whether it solves Newton's equation."""
    precondition = problem.preconditioner(here.sums)
    norm = (here.gradient * precondition(here.gradient)).sum(-1, keepdim=True)
    size = (norm / problem.n_rows).sqrt()
    n = here.x.shape[-1]
    step, solved = conjugate_gradients(
        lambda x: problem.reduce(here.sums.product(problem.expand(x))),
        precondition,
        lambda x, y: (x * y).sum(-1, keepdim=True),
        torch.where(wanted, -here.gradient, 0.0),
        norm * size.clamp(1e-6, 0.1) ** 2,
        most=min(_MAX_PRODUCTS, 50 + n),
        allowed=problem.allowed / 4,  # smaller residuals would be rounding
    )
    if n * problem.marginals[0, :, 0].numel() * problem.layout.n_query * problem.layout.n_key <= _DENSE:
        for system in (~solved[:, 0]).nonzero()[:, 0].tolist():
            dense = _dense_step(problem, here.x, here.gradient, system)
            if dense is not None:
                step[system], solved[system] = dense, True
    decrement = -(here.gradient * step).sum(-1, keepdim=True) / problem.n_rows
    failed = wanted & ~(decrement > 0)  # by rounding, where the pattern is practically 0 or 1 everywhere
    step = torch.where(failed, -precondition(here.gradient), step)
    gap = torch.where(wanted, decrement, size.square()) / 2
    return step, gap.masked_fill(failed, torch.inf), solved & ~failed


def _dense_step(problem: Problem, x: Coefficients, gradient: Coefficients, system: int) -> Tensor | None:
    """Compute one system's Newton step by a Cholesky factorisation of its Hessian, or return None if that fails."""
    one = problem.select(torch.tensor([system], device=x.device))
    sums = AttentionSums(one.layout, one.expand(x[system : system + 1]), direct=True)
    unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    hessian = torch.cat([one.reduce(sums.product(one.expand(some))) for some in unit.split(64)])
    scale = hessian.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 1e-12 * scale.max(), 1 / scale, 0.0)
    hessian = (hessian + hessian.mT) / 2 * scale * scale[:, None]
    for ridge in (1e-13, 1e-12, 1e-11, 1e-10, 1e-8, 1e-6):
        factor, failed = torch.linalg.cholesky_ex(hessian + ridge * unit)
        if not bool(failed):
            step = -scale * torch.cholesky_solve((scale * gradient[system])[:, None], factor)[:, 0]
            return step if bool(step.isfinite().all()) else None
    return None
