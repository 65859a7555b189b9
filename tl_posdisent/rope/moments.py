"""Means and covariances of queries and keys (moments), which determine the variance decomposition of the scores."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tl_posdisent.rope.rotary import Rotary, check_rotary, to_complex
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tensor_checks import Numbers, check_floating, real_numbers
from tl_posdisent.utils.words import plural

NUMBERS_AT_ONCE = 2**22  # size of a chunk of points: 32 MiB in float64


@dataclass(frozen=True, eq=False)
class Spread:
    """Count, mean and covariance of a set of points per head. ``a + b`` is the spread of both sets together.

    Attributes:
        count: number of points.
        mean, cov: mean and population covariance (divided by the count), in the units of the points.
    """

    count: float
    mean: Float64[Tensor, "head coordinate"]
    cov: Float64[Tensor, "head coordinate coordinate"]

    def __post_init__(self) -> None:
        if not (self.mean.isfinite().all() and self.cov.isfinite().all()):
            raise ValueError("a spread must have finite mean and covariance")

    def __add__(self, other: Spread) -> Spread:
        """Merge two spreads by the formula of Chan, Golub and LeVeque, which is stable for means far from 0."""
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


def spread_of(points: Float64[Tensor, "point head coordinate"]) -> Spread:
    """Compute mean and covariance of points; the covariance of equal points is exactly 0."""
    origin = points[0]
    mean = (points - origin).mean(0)
    by_head = (points - origin - mean).permute(1, 0, 2)
    return Spread(len(points), origin + mean, by_head.mT @ by_head / len(points))


def chunks(x: Float[Tensor, "*point head coordinate"]) -> Iterator[Float64[Tensor, "part head coordinate"]]:
    """Yield ``x`` in float64, a few points at a time."""
    points = x.shape[:-2]  # gathered by index: flattening may copy all of ``x``
    step = max(1, NUMBERS_AT_ONCE // math.prod(x.shape[-2:]))
    for start in range(0, points.numel(), step):
        part = torch.arange(start, min(start + step, points.numel()), device=x.device)
        yield x[torch.unravel_index(part, points)].double()


@dataclass(frozen=True, eq=False, repr=False)
class Moments:
    """Means and covariances of one layer's queries and keys before rotation.

    They are all that the variance decomposition at controlled distances needs (``decompose``). ``a + b`` are the
    moments of both texts together, ``sum(moments)`` those of a corpus. Coordinates are in the order of the subspaces,
    two for each, whatever the pairing; those that RoPE does not rotate follow.

    Attributes:
        query: ``count``, ``mean`` ``[head, d_head]`` and ``cov`` ``[head, d_head, d_head]`` of the queries, float64,
            in the units of the vectors; covariances are divided by the count.
        key: the same for the keys, per key head; query head h reads key head ``h // (n_heads // n_kv)``.
        rotary: the layer's frequencies, pairing and attention factor.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Moments, Rotary
        >>> rotary = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
        >>> q, k = torch.randn(2, 50, 8, 4), torch.randn(2, 50, 2, 4)  # two texts of 50 tokens, 8 heads on 2 key heads
        >>> sum(Moments.from_qk(*text, rotary) for text in zip(q, k))
        Moments of 100 queries and 100 keys: 8 heads on 2 key heads, d_head 4
          2 subspaces, wavelengths 6.28…62.8
    """

    query: Spread
    key: Spread
    rotary: Rotary

    @classmethod
    @torch.no_grad()
    def from_qk(
        cls, q: Float[Tensor, "*n_q head d_head"], k: Float[Tensor, "*n_k kv_head d_head"], rotary: Rotary
    ) -> Moments:
        """Compute the moments in float64, one chunk of queries or keys at a time.

        Args:
            q: queries before rotation and after any QK-norm, ``[*n_q, head, d_head]``, pooled over all leading axes.
                To exclude some of them (padding), index: ``q[keep]``.
            k: keys before rotation and after any QK-norm, ``[*n_k, kv_head, d_head]``; ``kv_head`` divides ``head``.
            rotary: the layer's rotation.

        Raises:
            ValueError: queries or keys that are empty, not finite, or do not match each other or the rotation.
        """
        _check_vectors(q, k, rotary)
        planes, rest = to_complex(torch.arange(q.shape[-1], dtype=torch.float64), rotary)
        order = torch.cat([torch.view_as_real(planes).flatten(), rest]).long().to(q.device)
        query, key = (_measured(name, x.detach(), order) for name, x in (("q", q), ("k", k)))
        return cls(query, key, rotary.to(q.device))

    def __add__(self, other: Moments) -> Moments:
        """Merge the moments of two sets of queries and keys.

        Raises:
            ValueError: moments of another shape or another rotation.
        """
        if not isinstance(other, Moments):
            return NotImplemented
        a, b = self.rotary, other.rotary
        differ = [x for x in ("pairing", "attention_factor", "angle_dtype") if getattr(a, x) != getattr(b, x)]
        differ += ["frequencies"] * (not torch.equal(a.frequencies.cpu(), b.frequencies.cpu()))
        if differ:
            raise ValueError(
                f"moments to be added must have the same rotary, got rotations that differ in {', '.join(differ)}"
            )
        return Moments(self.query + other.query, self.key + other.key, self.rotary)

    def __radd__(self, other: Literal[0]) -> Moments:
        """Support ``sum``, which begins with 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __repr__(self) -> str:
        (n_heads, d_head), n_kv = self.query.mean.shape, len(self.key.mean)
        heads = plural(n_heads, "head") + (f" on {plural(n_kv, 'key head')}" if n_kv != n_heads else "")
        waves, rest = self.rotary.wavelengths, d_head - self.rotary.dim
        span = f", wavelengths {waves.min().item():.3g}…{waves.max().item():.3g}" if len(waves) else ""
        return (
            f"Moments of {self.query.count:.0f} queries and {self.key.count:.0f} keys: {heads}, d_head {d_head}\n"
            f"  {plural(len(waves), 'subspace')}{span}" + (f", {plural(rest, 'coordinate')} un-rotated" if rest else "")
        )


def check_distances(moments: Moments, distances: Numbers) -> Float64[Tensor, " distance"]:
    """Return the distances in float64 on the device of the moments, or raise."""
    if not isinstance(moments, Moments):
        raise ArgumentError("moments", f"must be Moments (Moments.from_qk makes them), got {type(moments).__name__}")
    return real_numbers("distances", distances, moments.query.mean.device)


def _measured(name: str, x: Tensor, order: Int64[Tensor, " d_head"]) -> Spread:
    try:
        spread = total(map(spread_of, chunks(x)))
    except ValueError:  # NaN and infinity propagate to the covariance, so no second pass is needed to find them
        raise ArgumentError(name, "must be finite, and small enough to be squared") from None
    return Spread(spread.count, spread.mean[:, order], spread.cov[:, order][:, :, order])


def _check_vectors(q: Tensor, k: Tensor, rotary: Rotary) -> None:
    for name, x, axes in (("q", q, "(*n_q, head, d_head)"), ("k", k, "(*n_k, kv_head, d_head)")):
        check_floating(name, x)
        if x.ndim < 3 or x.numel() == 0:
            raise ArgumentError(name, f"must have shape {axes} and not be empty, got {tuple(x.shape)}")
    check_rotary(rotary)
    (n_heads, d_head), (n_kv, d_key) = q.shape[-2:], k.shape[-2:]
    if d_head != d_key:
        raise ValueError(f"queries and keys must have the same d_head, got {d_head} and {d_key}")
    if n_heads % n_kv:
        raise ValueError(f"the number of key heads must divide the number of heads, got {n_kv} and {n_heads}")
    if d_head < rotary.dim:
        raise ArgumentError("d_head", f"must be at least {rotary.dim}, two per frequency, got {d_head}")
