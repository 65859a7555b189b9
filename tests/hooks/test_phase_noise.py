"""Noise in RoPE's phases: how the angles are drawn, and what must not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import L, close, logits

from tl_posdisent import read_model
from tl_posdisent.hooks import phase_noise
from tl_posdisent.hooks.edits.rotation_edits import PhaseNoise


def subspaces(model: Any, layer: int = 0) -> int:
    return len(read_model(model).specs([layer])[0].rotary.frequencies)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_zero_and_a_common_angle_change_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain, n = logits(model, []), subspaces(model)
    close(logits(model, phase_noise(model, 0.0)), plain)
    close(logits(model, phase_noise(model, torch.zeros(L, n))), plain)
    close(logits(model, phase_noise(model, 0, heads=[1])), plain)
    common = torch.randn(n, dtype=torch.float64).expand(L, n)
    close(logits(model, phase_noise(model, common)), plain)
    close(logits(model, phase_noise(model, common + 2 * torch.pi * torch.randint(-3, 3, (L, n)), heads=[0, 6])), plain)
    assert (logits(model, phase_noise(model, torch.randn(L, n))) - plain).abs().max() > 0.1


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_angles_drawn(kind: str, name: str, shared_model: Any) -> None:
    """As large as asked for, of each position and subspace its own, common to texts, heads, queries and keys."""
    model, long = shared_model(kind, name), zoo.random_tokens(100)
    rotary = read_model(model).specs([1])[0].require_rotary("noise")

    def angles(size: float, seed: int = 4) -> torch.Tensor:
        (hooks,) = phase_noise(model, size, seed=seed, layers=[1]).interventions
        assert isinstance(hooks.edit, PhaseNoise)
        return hooks.edit.phases(rotary, torch.arange(100), 1)

    drawn = angles(0.3)
    assert 0.25 < drawn.std() < 0.35
    assert drawn.T.corrcoef().fill_diagonal_(0).abs().max() < 0.4  # subspaces
    assert (drawn[1:] * drawn[:-1]).mean().abs() < 0.03  # neighbours
    close(angles(0.6), 2 * drawn, 1e-12)
    assert (angles(0.3, seed=5) - drawn).abs().mean() > 0.1
    given = logits(model, phase_noise(model, drawn, layers=[1]), long)
    close(logits(model, phase_noise(model, 0.3, seed=4, layers=[1]), long), given, 0)
