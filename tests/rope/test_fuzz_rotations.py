"""Laws of rotations and of what is computed of queries and keys, for any frequencies, pairing and grouping."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import Heads, drawn_heads, examples, normal, rotaries
from torch import Tensor

from tl_posdisent.rope import (
    Rotary,
    principal_angles,
    rope_capacity,
    rotate,
    to_complex,
)
from tl_posdisent.rope.rotary import from_complex

SOME = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=6, unique=True)


def places(seed: int, n: int) -> Tensor:
    return (40 * normal(seed, n)).round() / 4


@examples(60)
@given(drawn_heads(), st.integers(0, 2**31), st.floats(-1000, 1000))
def test_scores_know_differences_of_positions_only(heads: Heads, seed: int, shift: float) -> None:
    at = places(seed, heads.q.shape[1])

    def scores(positions: Tensor) -> Tensor:
        q, k = (rotate(x, positions, heads.rotary) for x in (heads.q, heads.k))
        return torch.einsum("bihc,bjhc->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))

    size = float(heads.q.abs().max() * heads.k.abs().max()) * heads.q.shape[-1]
    torch.testing.assert_close(scores(at + shift), scores(at), rtol=0, atol=1e-10 * size)


@examples(60)
@given(drawn_heads(), st.integers(0, 2**31))
def test_rotation_and_subspaces_can_be_undone(heads: Heads, seed: int) -> None:
    q, at = heads.q, places(seed, heads.q.shape[1])
    planes, rest = to_complex(q, heads.rotary)
    back = to_complex(rotate(rotate(q, at, heads.rotary), -at, heads.rotary), heads.rotary)[0]
    torch.testing.assert_close(back / heads.rotary.attention_factor**2, planes, rtol=1e-10, atol=1e-10)
    assert torch.equal(from_complex(planes, rest, heads.rotary), q)
    turned = planes * heads.rotary.attention_factor * torch.exp(1j * heads.rotary.angles(at))[:, None]
    expected = from_complex(turned, rest, heads.rotary)
    torch.testing.assert_close(rotate(q, at, heads.rotary), expected, rtol=1e-10, atol=1e-10)


@examples(40)
@given(rotaries(least=1), SOME, st.integers(0, 2**31), st.sampled_from([1e-3, 1.0]), st.booleans())
def test_capacity_is_ridge_regression(
    rotary: Rotary, distances: list[float], seed: int, ridge: float, intercept: bool
) -> None:
    d, y = torch.tensor(distances, dtype=torch.float64), normal(seed, len(distances))
    found = rope_capacity(rotary, d, y, ridge=ridge, intercept=intercept)
    angle = rotary.angles(d)
    basis = torch.cat([angle.cos(), -angle.sin()], -1)
    n = basis.shape[1]
    free = torch.ones(len(d), 1, dtype=torch.float64) if intercept else torch.zeros(len(d), 0, dtype=torch.float64)
    table = torch.cat([torch.cat([basis, free], 1) / math.sqrt(len(d)), torch.eye(n + free.shape[1])[:n] * ridge**0.5])
    wanted = torch.cat([y / math.sqrt(len(d)), torch.zeros(n)])
    x = torch.from_numpy(np.linalg.lstsq(table.numpy(), wanted.numpy(), rcond=None)[0])
    torch.testing.assert_close(found.fitted, torch.cat([basis, free], 1) @ x, rtol=1e-6, atol=1e-8)


@examples(30)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_angles_belong_to_spaces_and_not_to_their_bases(d: int, m: int, n: int, seed: int) -> None:
    a, b = normal(seed, d, m), normal(seed + 1, d, n)
    angles = principal_angles(a, b)
    assert bool(((angles >= 0) & (angles <= math.pi / 2 + 1e-9)).all())
    turn = torch.linalg.qr(normal(seed + 2, d, d))[0]
    mixed = a @ (normal(seed + 3, m, m) + 5 * torch.eye(m, dtype=torch.float64))
    torch.testing.assert_close(principal_angles(turn @ mixed, turn @ b), angles, rtol=0, atol=1e-6)
    torch.testing.assert_close(principal_angles(b, a), angles, rtol=0, atol=1e-6)
