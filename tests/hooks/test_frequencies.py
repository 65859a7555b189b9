"""A band of RoPE's frequencies: exact in the model's own numbers, and layers that it leaves out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, logits

from tl_posdisent import limit_frequencies, read_attention

pytestmark = pytest.mark.usefixtures("unchecked")


def cut(model: Any, layer: int = 0) -> float:
    """A frequency between the fastest of a layer and the next, or below the only one."""
    frequencies = read_attention(model, layer).rotary.frequencies.sort(descending=True).values.tolist()
    return math.sqrt(frequencies[0] * frequencies[1]) if len(frequencies) > 1 else frequencies[0] / 2


@pytest.mark.parametrize(("kind", "name"), [*zoo.cases("llama-gqa"), ("bridge", "llama-yarn"), ("bridge", "neox")])
def test_the_whole_band_changes_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain = logits(model, [])
    fastest, slowest = (f(read_attention(model, 0).rotary.frequencies).item() for f in (torch.max, torch.min))
    for mode in ("drop", "freeze"):
        assert limit_frequencies(model, mode=mode) == []
        # Both ends belong to it, however a frequency was read off.
        ends = float(f"{slowest:.8g}"), float(f"{fastest:.8g}")
        assert torch.equal(logits(model, limit_frequencies(model, *ends, mode=mode, layers=[0])), plain)
        one = limit_frequencies(model, fastest, fastest, mode=mode)  # a band may be one frequency
        assert torch.equal(logits(model, one), logits(model, limit_frequencies(model, cut(model), mode=mode)))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
def test_exact_in_the_models_own_numbers(kind: str, name: str, shared_model: Any) -> None:
    """What stays in the band is not touched by rounding: queries of 0 and tables of position 0 are exact."""
    model = shared_model(kind, name)
    low = cut(model)
    spec = read_attention(model, 0)
    outside = spec.rotary.frequencies < low
    coordinates = torch.cat([outside, outside])
    name = spec.turn_q.name
    with torch.no_grad():
        plain = model.run_with_cache(TOKENS, names_filter=name)[1][name]
        unrotated = model.run_with_cache(TOKENS, names_filter=spec.q.name)[1][spec.q.name]
        for mode in ("drop", "freeze"):
            with model.hooks(fwd_hooks=limit_frequencies(model, low, mode=mode, layers=[0])):
                got = model.run_with_cache(TOKENS, names_filter=name)[1][name]
            assert torch.equal(got[..., ~coordinates], plain[..., ~coordinates])
            wanted = torch.zeros_like(got) if mode == "drop" else unrotated
            assert torch.allclose(got[..., coordinates], wanted[..., coordinates], atol=1e-5)
            assert mode == "freeze" or torch.equal(got[..., coordinates], wanted[..., coordinates])


@pytest.mark.parametrize(("kind", "name"), [("bridge", "smollm3"), ("bridge", "gemma3")])
def test_layers_of_other_kinds(kind: str, name: str, shared_model: Any) -> None:
    """Layers that do not rotate are passed over; a band may hold all of one layer and nothing of another."""
    model = shared_model(kind, name)
    hooks = limit_frequencies(model, high=cut(model), mode="freeze")
    layers = {x.spec.layer for x in hooks.interventions}
    assert layers == ({0} if name == "smollm3" else {0, 1})  # Gemma's third layer is slower
    assert (logits(model, hooks) - logits(model, [])).abs().max() > 0.05
