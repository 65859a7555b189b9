"""What RoPE can do: exact where it can be, of the model's rounding, and the condition of its basis."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tl_posdisent.rope import Rotary, rope_capacity, rotate
from tl_posdisent.rope.rotary import from_complex

DISTANCES = range(256)


def geometric(n: int, base: float = 10000.0) -> Rotary:
    """The frequencies of almost every model."""
    return Rotary(base ** -(torch.arange(n, dtype=torch.float64) / max(n, 1)))


def fourier(n: int, period: int) -> Rotary:
    """Evenly spread frequencies instead."""
    return Rotary(2 * torch.pi / period * torch.arange(n, dtype=torch.float64))


def basis(rotary: Rotary, distances: range = DISTANCES) -> Tensor:
    angle = torch.tensor(distances, dtype=torch.float64)[:, None] * rotary.frequencies
    return torch.cat([angle.cos(), -angle.sin()], -1)


TARGETS = {
    "step": [float(d < 10) for d in DISTANCES],
    "delta": [float(d == 1) for d in DISTANCES],
    "linear": [-d / 256 for d in DISTANCES],
}


@pytest.mark.parametrize("intercept", [False, True])
def test_a_profile_of_these_frequencies_is_recovered(intercept: bool) -> None:
    rotary = geometric(4, 500.0)
    z = torch.randn(4, dtype=torch.complex128)
    angle = torch.tensor(DISTANCES, dtype=torch.float64)[:, None] * rotary.frequencies
    target = (z * torch.exp(1j * angle)).real.sum(-1) + (5.0 if intercept else 0.0)
    found = rope_capacity(rotary, DISTANCES, target, intercept=intercept)
    torch.testing.assert_close(found.coefficients, z, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.fitted, target)
    assert found.intercept == pytest.approx(5.0 if intercept else 0.0)
    assert found.error < 1e-20
    assert found.norm == pytest.approx(float(z.abs().square().sum().sqrt()))
    with pytest.raises(ValueError, match="target must have one value per distance, got 1 values for 256 distances"):
        rope_capacity(rotary, DISTANCES, [1.0])
    with pytest.raises(ValueError, match="rotary must have at least one frequency"):
        rope_capacity(geometric(0), DISTANCES, target)


def test_coefficients_are_the_feature_of_a_query_and_a_key() -> None:
    """A query whose planes are z and a key whose planes are 1 have the profile as their rotated product."""
    rotary = geometric(6)
    found = rope_capacity(rotary, DISTANCES, TARGETS["step"])
    none = torch.zeros(0, dtype=torch.float64)
    q = from_complex(found.coefficients, none, rotary).expand(256, 1, -1)
    k = from_complex(torch.ones_like(found.coefficients), none, rotary)
    scores = rotate(q, torch.arange(256), rotary)[:, 0] @ k  # the key stands at 0
    torch.testing.assert_close(scores, found.fitted, rtol=1e-8, atol=1e-8 * found.norm)


def test_what_is_in_reach_of_a_model_and_what_is_not() -> None:
    """Slopes and blunt windows are; one distance alone is not: 32 frequencies have not the fast ones it takes."""
    llama = {name: rope_capacity(geometric(32), DISTANCES, y) for name, y in TARGETS.items()}
    assert llama["linear"].r2 > 0.9999
    assert llama["step"].r2 > 0.9
    assert llama["delta"].r2 < 0.4
    assert rope_capacity(geometric(64), DISTANCES, TARGETS["step"]).r2 > llama["step"].r2
    assert rope_capacity(geometric(128), DISTANCES, TARGETS["delta"]).r2 > 0.8


@pytest.mark.parametrize("target", TARGETS)
def test_evenly_spread_frequencies_can_do_everything(target: str) -> None:
    """The inverse Fourier transform: frequencies 0 … n/2 of the period say any function of n distances."""
    found = rope_capacity(fourier(129, 256), DISTANCES, TARGETS[target])
    assert found.error < 1e-24


def test_what_distances_cannot_tell_apart_gets_the_smallest_coefficients() -> None:
    twice = Rotary(torch.tensor([0.3, 0.3], dtype=torch.float64))
    found = rope_capacity(twice, range(20), [math.cos(0.3 * d) for d in range(20)])
    torch.testing.assert_close(found.coefficients, torch.full((2,), 0.5 + 0j, dtype=torch.complex128))
    assert found.condition > 1e15
    few = rope_capacity(geometric(4), [0, 1, 2], [1.0, 2.0, 0.0])  # three distances, eight unknowns
    assert few.error < 1e-20
    assert few.condition == math.inf


def test_condition_is_that_of_the_basis() -> None:
    found = rope_capacity(geometric(3), DISTANCES, TARGETS["step"])
    assert found.condition == pytest.approx(np.linalg.cond(basis(geometric(3)).numpy()), rel=1e-6)


def test_angles_are_rounded_as_the_model_rounds_them() -> None:
    rotary = Rotary(torch.tensor([1.0], dtype=torch.float64), angle_dtype=torch.bfloat16)
    distances = [100.0, 101.0, 103.0]
    rounded = torch.tensor(distances).bfloat16().double()
    found = rope_capacity(rotary, distances, rounded.cos())
    assert found.error < 1e-20
    assert found.coefficients[0].item() == pytest.approx(1)


def test_a_constant_has_no_variance_to_explain() -> None:
    found = rope_capacity(geometric(4), DISTANCES, [0.1] * 256)
    assert math.isnan(found.error)
    assert math.isnan(found.r2)
    shifted = rope_capacity(geometric(4), DISTANCES, [3.0 + y for y in TARGETS["step"]], intercept=True)
    plain = rope_capacity(geometric(4), DISTANCES, TARGETS["step"], intercept=True)
    assert shifted.r2 == pytest.approx(plain.r2)
    assert shifted.intercept == pytest.approx(plain.intercept + 3)
