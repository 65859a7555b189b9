"""L-BFGS: its directions are those of the update of the inverse Hessian, pair by pair, and its ends are minima."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tl_posdisent.additive.attention import lbfgs
from tl_posdisent.additive.attention.lbfgs import minimise

OPTIONS = {"gradient": 1e-9, "change": 1e-14}


def rosenbrock(x: Tensor) -> tuple[float, Tensor]:
    x = x.clone().requires_grad_()
    value = (100 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).sum()
    return value.item(), torch.autograd.grad(value, x)[0]


@pytest.mark.parametrize("n", [2, 7])
def test_the_minimum_is_found(n: int) -> None:
    found = minimise(rosenbrock, torch.zeros(n, dtype=torch.float64), steps=300, **OPTIONS)
    torch.testing.assert_close(found, torch.ones_like(found), rtol=0, atol=1e-6)


def test_directions_are_those_of_the_update_pair_by_pair() -> None:
    """The textbook update of the inverse Hessian as a dense matrix: H ← (I - ρ s yᵀ) H (I - ρ y sᵀ) + ρ s sᵀ."""
    g = torch.Generator().manual_seed(0)
    root = torch.randn(9, 9, generator=g, dtype=torch.float64)
    hessian = root @ root.mT + torch.eye(9, dtype=torch.float64)
    history, pairs = lbfgs._History(torch.zeros(9, dtype=torch.float64), 6), list[tuple[Tensor, Tensor]]()
    for _ in range(6):
        s, gradient = torch.randn(2, 9, generator=g, dtype=torch.float64)
        pairs.append((s, hessian @ s))
        history.add(*pairs[-1])
        history.add(s, -hessian @ s)  # of negative curvature, which is left out
        s, y = pairs[-1]
        inverse = torch.eye(9, dtype=torch.float64) * (s @ y) / (y @ y)
        for s, y in pairs:
            half = torch.eye(9, dtype=torch.float64) - torch.outer(s, y) / (s @ y)
            inverse = half @ inverse @ half.mT + torch.outer(s, s) / (s @ y)
        torch.testing.assert_close(history.direction(gradient), -inverse @ gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [1e-6, 1e-3, 0.3, 1.0, 20.0, 1e4])
def test_a_line_search_ends_where_the_wolfe_conditions_hold(length: float) -> None:
    """From steps far too short to far too long, on a line with many minima."""

    def wavy(x: Tensor) -> tuple[float, Tensor]:
        return float(x**2 / 10 + torch.cos(3 * x)), x / 5 - 3 * torch.sin(3 * x)

    start, direction = torch.tensor([4.0], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    value, gradient = wavy(start)
    slope = float(gradient @ direction)
    assert slope < 0
    found = lbfgs._line_search(wavy, start, direction, lbfgs._Point(0.0, value, gradient, slope), length)
    assert found.value <= value + 1e-4 * found.length * slope
    assert abs(found.slope) <= 0.9 * abs(slope)
    assert (found.value, found.slope) == (wavy(start + found.length * direction)[0], -found.gradient.item())


def test_the_value_never_rises_and_what_is_not_finite_is_not_entered() -> None:
    values = []

    def barrier(x: Tensor) -> tuple[float, Tensor]:
        """Infinite, or undefined, from 1 on; the minimum is just below."""
        inside = float(x[0]) < 1
        value = float(-50 * x[0] - torch.log1p(-x[0])) if inside else math.nan if float(x[0]) < 2 else math.inf
        values.append(value)
        return value, torch.stack([-50 + 1 / (1 - x[0])]) if inside else torch.full_like(x, math.nan)

    found = minimise(barrier, torch.zeros(1, dtype=torch.float64), steps=100, **OPTIONS)
    assert found.item() == pytest.approx(1 - 1 / 50, abs=1e-6)
    assert barrier(found)[0] == min(value for value in values if not math.isnan(value))


def test_at_a_minimum_nothing_moves() -> None:
    start = torch.ones(3, dtype=torch.float64)
    assert torch.equal(minimise(rosenbrock, start, steps=10, **OPTIONS), start)
    assert torch.equal(minimise(rosenbrock, start * 0, steps=0, **OPTIONS), start * 0)
