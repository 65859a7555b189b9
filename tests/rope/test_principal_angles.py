"""Angles between subspaces are those of scipy, and keep their digits where they are small or nearly right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tl_posdisent.rope import principal_angles


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 5), (5, 2), (4, 4), (7, 6)])
def test_angles_are_those_of_scipy(m: int, n: int) -> None:
    linalg = pytest.importorskip("scipy.linalg")
    a, b = normal(8, m), normal(8, n, seed=1)
    for x, y in ((a, b), (a, a[:, :1] + 1e-9 * b[:, :1]), (b, b @ normal(n, n, seed=2))):
        expected = torch.tensor(linalg.subspace_angles(x.numpy(), y.numpy()))
        torch.testing.assert_close(principal_angles(x, y), expected, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("angle", [0.0, 1e-10, 1e-3, 0.7, math.pi / 4, 0.8, math.pi / 2 - 1e-10, math.pi / 2])
def test_angles_keep_their_digits(angle: float) -> None:
    turned = torch.tensor([[1.0, 0], [0, math.cos(angle)], [0, math.sin(angle)]], dtype=torch.float64)
    plane, rotation = torch.eye(3, dtype=torch.float64)[:, :2], torch.linalg.qr(normal(3, 3)).Q
    for a, b in ((plane, turned), (turned, plane)):
        angles = principal_angles(rotation @ a @ normal(2, 2, seed=3), rotation @ b)
        torch.testing.assert_close(angles, torch.tensor([angle, 0], dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_dependent_columns_are_no_directions() -> None:
    a, b = normal(8, 2), normal(8, 3, seed=1)
    for repeated in (a @ normal(2, 5, seed=2), (a @ normal(2, 5, seed=2)).float()):
        torch.testing.assert_close(principal_angles(repeated, b), principal_angles(a, b), rtol=0, atol=1e-5)
