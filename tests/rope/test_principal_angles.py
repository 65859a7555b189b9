"""Angles between subspaces belong to the products of their projections, and small angles keep their digits."""

from __future__ import annotations

import math

import pytest
import torch
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent.rope import principal_angles


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 5), (5, 2), (4, 4), (7, 6)])
def test_squared_cosines_are_eigenvalues_of_products_of_projections(m: int, n: int) -> None:
    a, b = normal(8, m), normal(8, n, seed=1)
    onto_a, onto_b = (x @ torch.linalg.inv(x.mT @ x) @ x.mT for x in (a, b))
    expected = torch.linalg.eigvals(onto_a @ onto_b).real.sort(descending=True).values[: min(m, n)].flip(0)
    found = principal_angles(a, b)
    torch.testing.assert_close(found.cos().square(), expected, rtol=0, atol=1e-10)
    assert torch.equal(found, found.sort(descending=True).values)
    torch.testing.assert_close(principal_angles(b, b @ normal(n, n, seed=2)), found.new_zeros(n), rtol=0, atol=1e-12)


@pytest.mark.parametrize("angle", [0.0, 1e-10, 1e-3, 0.7, math.pi / 4, 0.8, math.pi / 2 - 1e-10, math.pi / 2])
def test_angles_of_planes_that_are_turned(angle: float) -> None:
    """To all digits if no angle is above 45°, else to the square root of rounding."""
    turned = torch.tensor([[1.0, 0], [0, math.cos(angle)], [0, math.sin(angle)]], dtype=torch.float64)
    plane, rotation = torch.eye(3, dtype=torch.float64)[:, :2], torch.linalg.qr(normal(3, 3)).Q
    for a, b in ((plane, turned), (turned, plane)):
        found = principal_angles(rotation @ a @ normal(2, 2, seed=3), rotation @ b)
        expected = torch.tensor([angle, 0], dtype=torch.float64)
        atol = rounding(1.0, 3, torch.float64)  # two bases, and the sines or cosines of their product
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=atol if angle <= 0.7 else math.sqrt(2 * atol))


def test_dependent_columns_are_no_directions() -> None:
    a, b = normal(8, 2), normal(8, 3, seed=1)
    for repeated in (a @ normal(2, 5, seed=2), (a @ normal(2, 5, seed=2)).float()):
        torch.testing.assert_close(principal_angles(repeated, b), principal_angles(a, b), rtol=0, atol=1e-5)
