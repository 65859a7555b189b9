"""The Mahalanobis distance of vectors from a reference sample, whose covariance is shrunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError


@dataclass(frozen=True, eq=False, repr=False)
class ReferenceSample:
    """A sample of vectors as a Gaussian: its mean, and its covariance shrunk towards a multiple of the identity.

    The covariance of n vectors, ``S = Σ (x - mean)(x - mean)ᵀ / n``, is replaced by ``(1 - ρ) S + ρ μ I`` with
    ``μ = tr S / d`` and the ρ of Ledoit and Wolf (J. Multivariate Anal. 88, 2004).

    Attributes:
        axes, spread: eigenvectors (in columns) and eigenvalues of S.
        shrinkage: ρ, from 0 to 1.
        sample: the deviations from the mean along the axes.
    """

    mean: Float64[Tensor, "*batch d"]
    axes: Float64[Tensor, "*batch d d"]
    spread: Float64[Tensor, "*batch d"]
    shrinkage: Float64[Tensor, "*batch"]
    sample: Float64[Tensor, "*batch n d"]

    def distance(self, x: Float[Tensor, "*batch m d"]) -> Float64[Tensor, "*batch m"]:
        """Mahalanobis distance of each vector from the mean."""
        deviation = (x.double() - self.mean[..., None, :]) @ self.axes
        return (deviation**2 / self._variances(1.0)[..., None, :]).sum(-1).sqrt()

    def distance_without(self, x: Float[Tensor, "*batch m d"], member: Int[Tensor, "m"]) -> Float64[Tensor, "*batch m"]:
        """The distance of each vector if one member of the sample had been left out (its own place, for instance).

        A member is nearer to a sample with itself in it: compare members and strangers by this. A rank-one update of
        mean and covariance; ρ and μ are kept.
        """
        n = self.sample.shape[-2]
        left = self.sample[..., member, :]
        deviation = (x.double() - self.mean[..., None, :]) @ self.axes + left / (n - 1)
        # Without the member the covariance is n/(n-1) S - n/(n-1)² uuᵀ, with u its deviation (Sherman–Morrison).
        inverse = 1 / self._variances(n / (n - 1))[..., None, :]
        weight = (1 - self.shrinkage)[..., None] * n / (n - 1) ** 2
        own, cross, plain = (
            (a * b * inverse).sum(-1) for a, b in ((left, left), (left, deviation), (deviation, deviation))
        )
        return (plain + weight * cross**2 / (1 - weight * own)).clamp_min(0).sqrt()

    def _variances(self, factor: float) -> Tensor:
        """Of the shrunk covariance along the axes; ``factor`` multiplies S before it is shrunk."""
        shrinkage = self.shrinkage[..., None]
        level = self.spread.mean(-1, keepdim=True)
        # From a sample that does not vary, every other vector is infinitely far, and no distance is NaN.
        return ((1 - shrinkage) * factor * self.spread + shrinkage * level).clamp_min(1e-200)


def fit_reference(x: Float[Tensor, "*batch n d"]) -> ReferenceSample:
    """Mean and shrunk covariance of n ≥ 2 vectors, for each leading index."""
    if x.ndim < 2 or x.shape[-2] < 2 or not bool(x.isfinite().all()):
        what = "some that are not finite" if x.ndim >= 2 and x.shape[-2] >= 2 else f"shape {tuple(x.shape)}"
        raise ArgumentError("x", f"must be at least two finite vectors (vector, coordinate), got {what}")
    mean = x.double().mean(-2)
    centred = x.double() - mean[..., None, :]
    n, d = centred.shape[-2:]
    covariance = centred.mT @ centred / n
    identity = torch.eye(d, dtype=torch.float64, device=x.device)
    level = covariance.diagonal(0, -2, -1).mean(-1)
    off = (covariance - level[..., None, None] * identity).square().sum((-2, -1))
    noise = (centred.square().sum(-1).square().mean(-1) - covariance.square().sum((-2, -1))) / n
    shrinkage = torch.where(off > 0, (noise / off).clamp(0, 1), 1.0)
    spread, axes = torch.linalg.eigh(covariance)
    return ReferenceSample(mean, axes, spread.clamp_min(0), shrinkage, centred @ axes)
