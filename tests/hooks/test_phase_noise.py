"""Noise in RoPE's phases: how the angles are drawn, and what must not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import L, close, logits

from tl_posdisent import read_model
from tl_posdisent.hooks import applied, phase_noise
from tl_posdisent.models.running.forward_pass import Hook

pytestmark = pytest.mark.tl4


def subspaces(model: Any, layer: int = 0) -> int:
    return len(read_model(model).specs([layer])[0].rotary.frequencies)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_zero_changes_nothing_and_a_common_angle_next_to_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain, n = logits(model, []), subspaces(model)
    assert torch.equal(logits(model, phase_noise(model, 0.0)), plain)
    assert torch.equal(logits(model, phase_noise(model, torch.zeros(L, n))), plain)
    close(logits(model, phase_noise(model, 0, heads=[1])), plain)
    common = torch.randn(n, dtype=torch.float64).expand(L, n)
    close(logits(model, phase_noise(model, common)), plain)
    close(logits(model, phase_noise(model, common + 2 * torch.pi * torch.randint(-3, 3, (L, n)), heads=[0, 6])), plain)
    assert (logits(model, phase_noise(model, torch.randn(L, n))) - plain).abs().max() > 0.1


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_angles_drawn(kind: str, name: str, shared_model: Any) -> None:
    """As large as asked for, of each position and subspace its own, common to texts, heads, queries and keys."""
    model, long = shared_model(kind, name), zoo.random_tokens(100)
    spec = read_model(model).specs([1])[0]

    def angles(hooks: list[Hook], tap: Any) -> torch.Tensor:
        def read(hooks: list[Hook]) -> torch.Tensor:
            held = {}
            with torch.no_grad(), applied(model, [*hooks, (tap.name, lambda x, hook: held.update(x=tap.read(x)))]):
                model(long)
            n = len(spec.rotary.frequencies)
            half = held["x"].unflatten(-1, (2, -1)).transpose(-1, -2) if spec.rotary.pairing == "half" else None
            x = (half if half is not None else held["x"][..., : 2 * n].unflatten(-1, (-1, 2))).double()
            return torch.view_as_complex(x.contiguous())

        return (read(hooks) / read([])).angle()

    drawn = angles(phase_noise(model, 0.3, seed=4, layers=[1]), spec.turn_k)
    one = drawn[0, :, 0]
    close(drawn, one[:, None].expand_as(drawn), 1e-4)
    close(angles(phase_noise(model, 0.3, seed=4, layers=[1]), spec.turn_q)[1, :, 5], one, 1e-4)
    assert 0.25 < one.std() < 0.35
    assert one.T.corrcoef().fill_diagonal_(0).abs().max() < 0.4  # subspaces
    assert (one[1:] * one[:-1]).mean().abs() < 0.03  # neighbours
    close(angles(phase_noise(model, 0.6, seed=4, layers=[1]), spec.turn_k)[0, :, 0], 2 * one, 1e-4)
    assert (angles(phase_noise(model, 0.3, seed=5, layers=[1]), spec.turn_k)[0, :, 0] - one).abs().mean() > 0.1
