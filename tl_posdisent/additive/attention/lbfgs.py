"""Minimise a smooth function by L-BFGS, with a matrix form of the recursion that takes few operations per step."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

Vector = Float64[Tensor, "parameter"]
Function = Callable[[Vector], tuple[float, Vector]]
"""A function of a vector that returns its value and gradient."""

_DECREASE, _CURVATURE = 1e-4, 0.9  # constants of the strong Wolfe conditions
_TRIALS = 25  # most evaluations of one line search


class _Point(NamedTuple):
    """A point on a line: its step length, and the value, gradient and slope there."""

    length: float
    value: float
    gradient: Vector
    slope: float


def minimise(function: Function, start: Vector, *, steps: int, gradient: float, change: float) -> Vector:
    """Search from ``start``, and return the last point; its value is at most that of ``start``.

    Args:
        function: returns value and gradient.
        start: first point.
        steps: most steps.
        gradient: stop if no entry of the gradient is larger.
        change: stop if a step changes the value, or every parameter, by less.
    """
    x, history = start, _History(start, steps)
    value, slopes = function(x)
    for step in range(steps):
        if not bool(slopes.abs().max() > gradient):
            break
        direction = history.direction(slopes)
        slope = float(slopes @ direction)
        if not slope < -change:
            break
        length = 1.0 if step else min(1.0, 1 / float(slopes.abs().sum()))
        origin = _Point(0.0, value, slopes, slope)
        found = _line_search(function, x, direction, origin, length)
        if not found.value <= value:
            break
        moved = found.length * direction
        history.add(moved, found.gradient - slopes)
        x, before, value, slopes = x + moved, value, found.value, found.gradient
        if abs(value - before) < change or not bool(moved.abs().max() > change):
            break
    return x


class _History:
    """Past steps s and changes y of the gradient, as rows, and their products.

    With ``S``, ``Y`` of these rows, ``R`` the upper triangle of ``S Yᵀ``, ``D`` its diagonal and ``γ = s·y / y·y`` of
    the last pair, the inverse Hessian is (Byrd, Nocedal and Schnabel 1994, theorem 2.2)::

        H g = γ g + Sᵀ R⁻ᵀ [(D + γ Y Yᵀ) R⁻¹ S g - γ Y g] - γ Yᵀ R⁻¹ S g
    """

    def __init__(self, like: Vector, most: int) -> None:
        self._n, self._scale = 0, 1.0
        self._s, self._y = like.new_zeros(most, len(like)), like.new_zeros(most, len(like))
        self._sy, self._yy = like.new_zeros(most, most), like.new_zeros(most, most)

    def add(self, s: Vector, y: Vector) -> None:
        """Append a pair, unless its curvature is not clearly positive."""
        if not float(s @ y) > 1e-10:
            return
        n = self._n
        self._s[n], self._y[n] = s, y
        self._sy[: n + 1, n] = self._s[: n + 1] @ y
        self._yy[n, : n + 1] = self._yy[: n + 1, n] = self._y[: n + 1] @ y
        self._n, self._scale = n + 1, float(self._sy[n, n] / self._yy[n, n])

    def direction(self, gradient: Vector) -> Vector:
        """Return minus the inverse Hessian times the gradient."""
        n, scale = self._n, self._scale
        if not n:
            return -gradient
        s, y, upper = self._s[:n], self._y[:n], self._sy[:n, :n]
        of_s = torch.linalg.solve_triangular(upper, (s @ gradient)[:, None], upper=True)
        inner = torch.addmv(upper.diagonal() * of_s[:, 0], self._yy[:n, :n], of_s[:, 0], alpha=scale)
        inner.sub_(y @ gradient, alpha=scale)
        of_y = torch.linalg.solve_triangular(upper.mT, inner[:, None], upper=False)
        out = torch.addmv(gradient, y.mT, of_s[:, 0], beta=-scale, alpha=scale)
        return torch.addmv(out, s.mT, of_y[:, 0], alpha=-1)


def _line_search(function: Function, x: Vector, direction: Vector, origin: _Point, length: float) -> _Point:
    """Find a point that satisfies the strong Wolfe conditions, or the lowest that was found.

    Steps grow until an interval contains such a point, and then cubic interpolation shrinks the interval (Nocedal and
    Wright 2006, algorithms 3.5 and 3.6).
    """

    def at(length: float) -> _Point:
        value, gradient = function(torch.add(x, direction, alpha=length))
        return _Point(length, value, gradient, float(gradient @ direction))

    def high(point: _Point, than: _Point) -> bool:
        too_high = point.value > origin.value + _DECREASE * point.length * origin.slope
        return too_high or point.value >= than.value or point.value != point.value

    low, there = origin, at(length)
    for trial in range(_TRIALS):
        if high(there, low if trial else origin._replace(value=torch.inf)):
            other = there
            break
        if abs(there.slope) <= -_CURVATURE * origin.slope:
            return there
        if there.slope >= 0:
            low, other = there, low
            break
        near, far = there.length + 0.01 * (there.length - low.length), 10 * there.length
        low, there = there, at(_minimum(low, there, near, far))
    else:
        return low
    size, slow = float(direction.abs().max()), False
    for _ in range(_TRIALS - trial):
        ends = sorted((low.length, other.length))
        if (ends[1] - ends[0]) * size < 1e-9:
            break
        length = _minimum(low, other, *ends)
        margin = 0.1 * (ends[1] - ends[0])
        inner = min(max(length, ends[0] + margin), ends[1] - margin)
        at_end = length in ends or (length != inner and slow)  # close to an end twice in a row
        slow, length = length != inner and not at_end, inner if at_end else length
        there = at(length)
        if high(there, low):
            other = there
        elif abs(there.slope) <= -_CURVATURE * origin.slope:
            return there
        else:
            other = low if there.slope * (other.length - low.length) >= 0 else other
            low = there
    return low


def _minimum(a: _Point, b: _Point, least: float, most: float) -> float:
    """Return the minimum of the cubic through two points with their slopes, between two bounds."""
    a, b = (a, b) if a.length <= b.length else (b, a)
    d = a.slope + b.slope - 3 * (a.value - b.value) / (a.length - b.length)
    square = d * d - a.slope * b.slope
    if not 0 <= square < float("inf"):
        return (least + most) / 2
    root = sqrt(square)
    denominator = b.slope - a.slope + 2 * root
    if denominator == 0:
        return (least + most) / 2
    return min(max(b.length - (b.length - a.length) * (b.slope + root - d) / denominator, least), most)
