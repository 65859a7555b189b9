"""Newton's method for additive attention: coefficients whose pattern has given marginals.

``Σ_i log Z_i - marginals · coefficients`` is convex, and its gradient is the marginals of the model less those of the
data. Conjugate gradients solve for each step, with products from ``AttentionSums`` and the marginals as a diagonal
preconditioner. Directions that change no pattern (constants, a straight line) have no gradient either, and neither the
gradient nor the preconditioner leads into them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.attention.attention_sums import AttentionSums, Layout, Stacked

AIM = 1e-9  # of each marginal, or of one unit of attention where the marginal is less
_LONGEST = 8.0  # nats that a sweep may change a coefficient by
_MAX_STEPS, _MAX_PRODUCTS = 60, 400
_LEAST = 1e-3  # of its marginal, that a diagonal entry is taken to be
_NEGLIGIBLE = 1e-12  # of the largest eigenvalue of the features' second moments

Keys = Literal["free", "none", "features"]
Coefficients = Float64[Tensor, "system parameter"]


@dataclass(frozen=True, eq=False)
class Design:
    """How the coefficients of a fit become those of the cells: one distance profile for all texts of a system.

    Attributes:
        distance: whether there is a profile.
        keys: a coefficient for each key of each text (``"free"``), none, or linear in the features of the keys.
        features: of each key; one direction per system and band.
    """

    layout: Layout
    n_text: int
    distance: bool = True
    keys: Keys = "free"
    features: Float64[Tensor, "system text key feature"] | None = None

    @property
    def n_profile(self) -> int:
        """Number of coefficients of the distance."""
        return self.layout.n_distance if self.distance else 0

    @property
    def separate(self) -> list[slice]:
        """Groups of coefficients of which each cell has one at most."""
        keys = [slice(self.n_profile, None)] if self.keys == "free" else []
        return [slice(0, self.n_profile), *keys] if self.distance else keys

    def sums(self, stacked: Stacked) -> AttentionSums:
        """Normalisers and marginals at these coefficients of the cells."""
        return AttentionSums(self.layout, stacked, keys_alone=not self.distance)

    def expand(self, x: Coefficients) -> Stacked:
        """The coefficients of the cells."""
        layout, n = self.layout, len(x)
        by_distance = x.new_zeros(n, self.n_text, layout.n_distance)
        if self.distance:
            by_distance = by_distance + x[:, None, : self.n_profile]
        rest = x[:, self.n_profile :]
        if self.features is not None:
            rest = torch.einsum("stkf,sbf->stbk", self.features, rest.unflatten(-1, (layout.n_band, -1)))
        elif self.keys == "none":
            rest = x.new_zeros(n, self.n_text, layout.n_band * layout.n_key)
        return torch.cat([by_distance, rest.reshape(n, self.n_text, -1)], -1)

    def reduce(self, stacked: Stacked, *, size: bool = False) -> Coefficients:
        """The transpose of ``expand``; with ``size`` of the absolute features, for what rounding may amount to."""
        by_distance, by_key = self.layout.split(stacked)
        parts = [by_distance.sum(1)] if self.distance else []
        if self.features is not None:
            features = self.features.abs() if size else self.features
            parts.append(torch.einsum("stkf,stbk->sbf", features, by_key).flatten(1))
        elif self.keys == "free":
            parts.append(by_key.flatten(1))
        return torch.cat(parts, -1) if parts else stacked.new_zeros(len(stacked), 0)

    def preconditioner(self, sums: AttentionSums) -> Callable[[Coefficients], Coefficients]:
        """Division by the Hessian's diagonal; of features, by their second moments, weighted with it."""
        diagonal = sums.diagonal.maximum(_LEAST * sums.marginals)
        weights = self.reduce(diagonal)
        inverse = torch.where(weights > 0, 1 / weights, 0.0)
        if self.features is None:
            return lambda x: x * inverse
        n, n_band = self.n_profile, self.layout.n_band
        by_key = self.layout.split(diagonal)[1]
        moments = torch.einsum("stkf,stbk,stkg->sbfg", self.features, by_key, self.features)
        values, vectors = torch.linalg.eigh(moments)
        kept = values > _NEGLIGIBLE * values[..., -1:].clamp_min(torch.finfo(values.dtype).tiny)
        moments_inverse = (vectors * torch.where(kept, 1 / values, 0.0)[..., None, :]) @ vectors.mT

        def divide(x: Coefficients) -> Coefficients:
            of_features = torch.einsum("sbfg,sbg->sbf", moments_inverse, x[:, n:].unflatten(-1, (n_band, -1)))
            return torch.cat([x[:, :n] * inverse[:, :n], of_features.flatten(1)], -1)

        return divide


@dataclass(frozen=True, eq=False)
class Solution:
    """What Newton's method found.

    Attributes:
        coefficients: of the design.
        stacked: of the cells.
        sums: normalisers and marginals there.
        steps, products: of Newton's method, and products with the Hessian.
    """

    coefficients: Coefficients
    stacked: Stacked
    sums: AttentionSums
    steps: int
    products: int


def solve_attention(design: Design, marginals: Stacked, aim: float = AIM) -> Solution:
    """Coefficients at which the marginals of the model are the given ones, as far as the design can tell them apart.

    Args:
        design: what the coefficients are.
        marginals: of the data, stacked; inside the polytope of possible ones, or there is no solution.
        aim: how near to come to each marginal. The objective then errs by about its square.

    Raises:
        RuntimeError: not converged; says how far it came.
    """
    x = _begin(design, marginals)
    target = design.reduce(marginals)
    allowed = aim * design.reduce(marginals, size=True).clamp_min(1)
    n_rows = design.layout.queries.expand(len(x), design.n_text, -1).sum((-2, -1))[:, None]
    steps = products = 0
    while True:
        x, stacked, sums = _scale(design, target, x)
        value = _value(sums, stacked, marginals)
        gradient = design.reduce(sums.marginals) - target
        worst = (gradient.abs() / allowed).amax(-1, keepdim=True) if gradient.shape[-1] else value.new_zeros(1, 1)
        if bool((worst <= 1).all()):
            return Solution(x, stacked, sums, steps, products)
        if steps == _MAX_STEPS or not bool(worst.isfinite().all()):
            raise RuntimeError(
                f"the additive model of attention has not converged after {steps} steps: a marginal is off by "
                f"{float(gradient.abs().max()):.1e}; a larger pseudo_count makes the problem better posed"
            )
        precondition = design.preconditioner(sums)
        size = ((gradient * precondition(gradient)).sum(-1, keepdim=True) / n_rows).sqrt()
        tolerance = size.clamp(1e-6, 0.1)
        gradient = torch.where(worst > 1, gradient, 0.0)  # a solved system stands still while others go on
        step, n = _conjugate_gradients(design, sums, precondition, -gradient, tolerance, allowed)
        products += n
        x = _line_search(design, marginals, x, value, gradient, step)
        steps += 1


def _begin(design: Design, marginals: Stacked) -> Coefficients:
    """Logarithms of the marginals, relative to those of uniform attention; features begin at 0."""
    target = design.reduce(marginals)
    uniform = design.reduce(design.sums(torch.zeros_like(marginals)).marginals)
    start = torch.where(target > 0, (target / uniform).log(), 0.0)
    if design.features is not None:
        start[:, design.n_profile :] = 0
    if design.keys == "free" and not design.distance and design.layout.is_causal:
        return _keys_alone(design.layout, marginals)
    return start


def _keys_alone(layout: Layout, marginals: Stacked) -> Coefficients:
    """The solution itself, where each query sees all keys up to its own and keys alone have coefficients.

    Attention from the queries at or after position j to the keys up to j is their number less what the later keys get,
    ``T_j``. Key j gets its part ``m_j / T_j`` of it in each of these queries, so a normaliser over keys up to j - 1 is
    one over keys up to j times ``1 - m_j / T_j``, and the importance is the logarithm of the part of the normaliser.
    """
    by_key = layout.split(marginals)[1][..., 0, :]
    queries = torch.nn.functional.pad(layout.queries.to(by_key), (layout.offset, 0))
    total = (queries - by_key).flip(-1).cumsum(-1).flip(-1) + by_key
    part = torch.where(by_key > 0, by_key / total, 0.0).clamp(0, 1)
    others = torch.log1p(-part).flip(-1).cumsum(-1).flip(-1)
    log_z = torch.nn.functional.pad(others[..., 1:], (0, 1))
    return torch.where(by_key > 0, part.log() + log_z, 0.0).nan_to_num(neginf=0.0).flatten(1)


def _value(sums: AttentionSums, stacked: Stacked, marginals: Stacked) -> Float64[Tensor, "system 1"]:
    return sums.log_z.sum((-2, -1))[:, None] - (stacked * marginals).sum((-2, -1))[:, None]


def _scale(design: Design, target: Coefficients, x: Coefficients) -> tuple[Coefficients, Stacked, AttentionSums]:
    """Iterative proportional fitting, one sweep: give distances, then keys, the marginals that they should have.

    This never raises the objective. Newton's method by itself overshoots, by orders of magnitude, where a coefficient
    is so low that the model's marginal is much below the data's.
    """
    stacked = design.expand(x)
    sums = design.sums(stacked)
    for part in design.separate:
        now = design.reduce(sums.marginals)[:, part]
        ratio = (target[:, part] / now.clamp_min(1e-12)).clamp_min(1e-300).log().clamp(-_LONGEST, _LONGEST)
        x = x.clone()
        x[:, part] += torch.where(target[:, part] > 0, ratio, 0.0)
        stacked = design.expand(x)
        sums = design.sums(stacked)
    return x, stacked, sums


def _line_search(
    design: Design, marginals: Stacked, x: Coefficients, value: Tensor, gradient: Coefficients, step: Coefficients
) -> Coefficients:
    """Halve the step of each system until it lowers the objective as it should."""
    slope = (gradient * step).sum(-1, keepdim=True)
    length = torch.ones_like(slope)
    for _ in range(40):
        moved = torch.addcmul(x, length, step)
        stacked = design.expand(moved)
        new = _value(design.sums(stacked), stacked, marginals)
        rounding = 1e-11 * value.abs().clamp_min(1)
        good = (new <= value + 1e-4 * length * slope + rounding) & new.isfinite()
        if bool(good.all()):
            break
        length = torch.where(good, length, length / 2)
    return moved


def _conjugate_gradients(
    design: Design,
    sums: AttentionSums,
    precondition: Callable[[Coefficients], Coefficients],
    target: Coefficients,
    tolerance: Float64[Tensor, "system 1"],
    allowed: Coefficients,
) -> tuple[Coefficients, int]:
    """Solve until each system's residual is below its tolerance, relative to the target, or allowed for a gradient.

    Returns:
        The solution, and the number of products.
    """
    solution, residual = torch.zeros_like(target), target.clone()
    direction = precondition(residual)
    rho = (residual * direction).sum(-1, keepdim=True)
    aim, least = rho * tolerance**2, rho
    active = rho > 0
    n = 0
    while n < _MAX_PRODUCTS and bool(active.any()):
        n += 1
        image = design.reduce(sums.product(design.expand(direction)))
        curvature = (direction * image).sum(-1, keepdim=True)
        alpha = torch.where(active & (curvature > 0), rho / curvature, 0.0)
        solution.addcmul_(alpha, direction)
        residual.addcmul_(alpha, image, value=-1)
        z = precondition(residual)
        new = (residual * z).sum(-1, keepdim=True)
        least = least.minimum(new)
        enough = (residual.abs() <= allowed / 4).all(-1, keepdim=True)  # less would be rounding
        active &= (curvature > 0) & (new > aim) & ~enough & (new <= 1e6 * least)
        direction = torch.addcmul(z, torch.where(active, new / rho, 0.0), direction)
        rho = new
    return solution, n
