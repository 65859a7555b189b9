"""Attention outputs (``hook_z``) of some layers, and their Mahalanobis distance from a reference sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.reading.forward import Hook, run
from tl_posdisent.models.reading.spec import AttentionSpec


@dataclass(frozen=True, eq=False, repr=False)
class ReferenceSample:
    """A sample of vectors as a Gaussian: its mean, and its covariance shrunk towards a multiple of the identity.

    The covariance of n vectors, ``S = Σ (x - mean)(x - mean)ᵀ / n``, is replaced by ``(1 - ρ) S + ρ μ I`` with
    ``μ = tr S / d`` and the ρ of Ledoit and Wolf (J. Multivariate Anal. 88, 2004).

    Attributes:
        mean: ``[*batch, d]``.
        axes, spread: ``[*batch, d, d]`` and ``[*batch, d]``, eigenvectors (in columns) and eigenvalues of S.
        shrinkage: ``[*batch]``, ρ from 0 to 1.
        sample: ``[*batch, n, d]``, the deviations from the mean along the axes.
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
    """Mean and shrunk covariance of n ≥ 2 vectors, for each leading index.

    Example:
        >>> import torch
        >>> from tl_posdisent.experiments.robustness.attention_outputs import fit_reference
        >>> x = torch.randn(5000, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0])
        >>> fit_reference(x).distance(torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 30.0]])).round().tolist()
        [0.0, 3.0, 3.0]
    """
    if x.ndim < 2 or x.shape[-2] < 2 or not bool(x.isfinite().all()):
        what = "some that are not finite" if x.ndim >= 2 and x.shape[-2] >= 2 else f"shape {tuple(x.shape)}"
        raise ValueError(f"x must be at least two finite vectors (vector, coordinate), got {what}")
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


def for_each_output(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    specs: Sequence[AttentionSpec],
    function: Callable[[int, Float[Tensor, "batch pos head d_head"]], None],
    hooks: Sequence[Hook] = (),
) -> None:
    """Run the model once, under these hooks, and call ``function`` with the number and z of each of these layers.

    Raises:
        ValueError: a layer without ``hook_z``; outputs that are not finite.
    """

    def listener(spec: AttentionSpec) -> Hook:
        def listen(z: Tensor, hook: Any) -> None:
            require_finite(z, spec.layer)
            function(spec.layer, z.detach())

        if spec.z is None:
            raise ValueError(f"layer {spec.layer} of {spec.architecture} shows no hook_z")
        return spec.z, listen

    last = max(spec.layer for spec in specs) + 1
    with applied(model, list(hooks)):
        run(model, tokens, [listener(spec) for spec in specs], stop=None if hooks else last)  # hooks may act later


def require_finite(z: Tensor, layer: int) -> None:
    if not bool(torch.isfinite(z).all()):
        raise ValueError(f"the attention outputs of layer {layer} are not finite")
