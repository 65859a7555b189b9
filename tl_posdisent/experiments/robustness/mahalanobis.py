"""Mahalanobis distances of vectors from a reference sample, with a shrunk covariance."""

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
        """Compute the Mahalanobis distance of each vector from the mean."""
        deviation = (x.double() - self.mean[..., None, :]) @ self.axes
        return (deviation**2 / self._variances(1.0)[..., None, :]).sum(-1).sqrt()

    def distance_without(
        self, x: Float[Tensor, "*batch m d"], member: Int[Tensor, " m"]
    ) -> Float64[Tensor, "*batch m"]:
        """Compute the distance of each vector from the sample without one of its members.

        A vector is nearer to a sample that contains it. Leave it out, so that its distance can be compared with that of
        vectors outside the sample. Mean and covariance get a rank-one update; ρ and μ are kept.

        Args:
            member: for each vector, the index of the member that is left out, for instance its own.
        """
        n = self.sample.shape[-2]
        left = self.sample[..., member, :]
        deviation = (x.double() - self.mean[..., None, :]) @ self.axes + left / (n - 1)
        # Without the member, whose deviation is u, the covariance is n/(n-1) S - n/(n-1)² uuᵀ (Sherman–Morrison).
        inverse = 1 / self._variances(n / (n - 1))[..., None, :]
        weight = (1 - self.shrinkage)[..., None] * n / (n - 1) ** 2
        left_square, cross, square = (
            (a * b * inverse).sum(-1) for a, b in ((left, left), (left, deviation), (deviation, deviation))
        )
        return (square + weight * cross**2 / (1 - weight * left_square)).clamp_min(0).sqrt()

    def _variances(self, factor: float) -> Tensor:
        """Return the variances of the shrunk covariance along the axes; ``factor`` multiplies S before it is shrunk."""
        shrinkage = self.shrinkage[..., None]
        level = self.spread.mean(-1, keepdim=True)
        # If the sample does not vary, the distance of any other vector is huge instead of NaN.
        return ((1 - shrinkage) * factor * self.spread + shrinkage * level).clamp_min(1e-200)


def fit_reference(x: Float[Tensor, "*batch n d"]) -> ReferenceSample:
    """Compute the mean and the shrunk covariance of n ≥ 2 vectors, for each leading index."""
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
