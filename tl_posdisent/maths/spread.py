"""Mean and covariance of more points than fit into memory, merged chunk by chunk."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

_CHUNK = 2**22  # numbers in one chunk: 32 MiB in float64


class Spread(NamedTuple):
    """What is known of a cloud of points per head: their weight (or count), mean and population covariance."""

    weight: float
    mean: Float64[Tensor, "head coordinate"]
    cov: Float64[Tensor, "head coordinate coordinate"]


def merge(a: Spread, b: Spread) -> Spread:
    """The spread of two clouds together (Chan, Golub & LeVeque): no sum of squares about a far-away origin."""
    weight = a.weight + b.weight
    part, shift = b.weight / weight, b.mean - a.mean
    cov = (1 - part) * a.cov + part * b.cov
    return Spread(weight, a.mean + part * shift, cov + part * (1 - part) * shift[..., :, None] * shift[..., None, :])


def spread_of(
    points: Float64[Tensor, "point head coordinate"], weights: Float64[Tensor, "point"] | None = None
) -> Spread:
    """Mean and covariance of points at hand; equal points have a covariance of exactly 0."""
    origin = points[0]
    moved = points - origin
    if weights is None:
        weights = moved.new_ones(len(moved))
    weight = weights.sum()
    mean = torch.einsum("n,nha->ha", weights, moved) / weight
    moved = (moved - mean) * (weights / weight).sqrt()[:, None, None]
    by_head = moved.permute(1, 0, 2)
    return Spread(float(weight), origin + mean, by_head.mT @ by_head)


def merge_all(spreads: Iterable[Spread]) -> Spread:
    """The spread of many clouds together."""
    return functools.reduce(merge, spreads)


def chunks(x: Float[Tensor, "*point head coordinate"]) -> Iterator[Float64[Tensor, "part head coordinate"]]:
    """``x`` in float64, a few points at a time. Points are gathered by index: flattening may copy all of ``x``."""
    points = x.shape[:-2]
    step = max(1, _CHUNK // max(1, math.prod(x.shape[-2:])))
    for start in range(0, math.prod(points), step):
        here = torch.arange(start, min(start + step, math.prod(points)), device=x.device)
        yield x[torch.unravel_index(here, points)].double()
