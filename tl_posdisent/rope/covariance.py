"""Mean and covariance of more points than fit into memory, merged chunk by chunk."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

NUMBERS_AT_ONCE = 2**22  # of a chunk of points: 32 MiB in float64


@dataclass(frozen=True, eq=False)
class Spread:
    """Count, mean and covariance of a set of points per head. ``a + b`` are those of both sets together.

    Attributes:
        count: how many points there are; their total weight, if they are weighted.
        mean: ``[head, coordinate]``, float64, in the units of the points.
        cov: ``[head, coordinate, coordinate]``, population covariance (divided by the count).
    """

    count: float
    mean: Float64[Tensor, "head coordinate"]
    cov: Float64[Tensor, "head coordinate coordinate"]

    def __post_init__(self) -> None:
        if not (self.mean.isfinite().all() and self.cov.isfinite().all()):
            raise ValueError("a spread must have finite mean and covariance")

    def __add__(self, other: Spread) -> Spread:
        """Merge by the formula of Chan, Golub and LeVeque, which has no sum of squares about a far-away origin."""
        if self.mean.shape != other.mean.shape:
            shapes = f"{tuple(self.mean.shape)} and {tuple(other.mean.shape)}"
            raise ValueError(f"spreads to be added must have the same shape, got {shapes}")
        count = self.count + other.count
        part, shift = other.count / count, other.mean - self.mean
        between = part * (1 - part) * shift[..., :, None] * shift[..., None, :]
        return Spread(count, self.mean + part * shift, (1 - part) * self.cov + part * other.cov + between)


def total(spreads: Iterable[Spread]) -> Spread:
    """Merge the spreads of many sets of points."""
    return functools.reduce(operator.add, spreads)


def spread_of(
    points: Float64[Tensor, "point head coordinate"], weights: Float64[Tensor, "point"] | None = None
) -> Spread:
    """Compute mean and covariance of (weighted) points; equal points have a covariance of exactly 0."""
    origin = points[0]
    moved = points - origin
    if weights is None:
        weights = moved.new_ones(len(moved))
    count = weights.sum()
    mean = torch.einsum("n,nha->ha", weights, moved) / count
    moved = (moved - mean) * (weights / count).sqrt()[:, None, None]
    by_head = moved.permute(1, 0, 2)
    return Spread(float(count), origin + mean, by_head.mT @ by_head)


def chunks(x: Float[Tensor, "*point head coordinate"]) -> Iterator[Float64[Tensor, "part head coordinate"]]:
    """Yield ``x`` in float64, a few points at a time."""
    points = x.shape[:-2]  # gathered by index: flattening may copy all of ``x``
    step = max(1, NUMBERS_AT_ONCE // math.prod(x.shape[-2:]))
    for start in range(0, points.numel(), step):
        here = torch.arange(start, min(start + step, points.numel()), device=x.device)
        yield x[torch.unravel_index(here, points)].double()
