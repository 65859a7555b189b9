"""A band of RoPE's frequencies: exact in the model's own numbers, and layers that it leaves out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from support import zoo
from support.intervention_cases import logits

from tl_posdisent import limit_frequencies, read_model
from tl_posdisent.hooks.edit import within_band
from tl_posdisent.rope import Rotary

pytestmark = pytest.mark.usefixtures("unchecked")


def cut(model: Any, layer: int = 0) -> float:
    """A frequency between the fastest of a layer and the next, or below the only one."""
    frequencies = read_model(model).specs(layer)[0].rotary.frequencies.sort(descending=True).values.tolist()
    return math.sqrt(frequencies[0] * frequencies[1]) if len(frequencies) > 1 else frequencies[0] / 2


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "llama-yarn"))
def test_the_whole_band_changes_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain = logits(model, [])
    fastest, slowest = (f(read_model(model).specs(0)[0].rotary.frequencies).item() for f in (torch.max, torch.min))
    for mode in ("drop", "freeze"):
        assert limit_frequencies(model, low=0, mode=mode) == []
        # Both ends belong to it, however a frequency was read off.
        ends = float(f"{slowest:.8g}"), float(f"{fastest:.8g}")
        assert torch.equal(logits(model, limit_frequencies(model, *ends, mode=mode, layers=[0])), plain)
        one = limit_frequencies(model, fastest, fastest, mode=mode)  # a band may be one frequency
        assert torch.equal(logits(model, one), logits(model, limit_frequencies(model, cut(model), mode=mode)))


@pytest.mark.parametrize("arguments", [{}, {"mode": "freeze"}, {"layers": 0}, {"low": None, "side": "outside"}])
def test_a_call_that_limits_nothing_is_refused(arguments: dict[str, Any], shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    with pytest.raises(ValueError, match="low or high must be given, or nothing is removed, got None for both: give"):
        limit_frequencies(model, **arguments)
    assert (logits(model, limit_frequencies(model, side="inside")) - logits(model, [])).abs().max() > 0


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
@pytest.mark.parametrize("mode", ["drop", "freeze"])
def test_removing_a_band_is_keeping_the_rest(mode: Any, kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    below = math.nextafter(cut(model), 0)
    ends = {"high": below, "mode": mode, "side": "inside", "layers": [0]}
    removed = limit_frequencies(model, **ends)
    kept = limit_frequencies(model, cut(model), mode=mode, layers=[0])
    assert torch.equal(logits(model, removed), logits(model, kept))
    assert not torch.equal(logits(model, removed), logits(model, []))
    assert "side='inside'" in repr(removed)


def test_ends_of_other_types(shared_model: Any) -> None:
    """NumPy's numbers, from a table of frequencies, and integers."""
    model = shared_model("bridge", "llama-gqa")
    wanted = repr(limit_frequencies(model, 0.25, 1.0))
    for number in (np.float64, np.float32):
        assert repr(limit_frequencies(model, number(0.25), number(1.0))) == wanted
    assert repr(limit_frequencies(model, 0.25, 1)) == wanted


def test_a_band_without_frequencies_is_not_removed(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    for band in ((0.0, 0.0), (50.0, 60.0)):
        with pytest.raises(ValueError, match="must enclose a frequency"):
            limit_frequencies(model, *band, side="inside")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "llama-yarn", "gpt_oss"))
def test_a_limit_at_a_frequency_keeps_it_in_16_bits(
    kind: str, name: str, dtype: torch.dtype, shared_model: Any
) -> None:
    """Its tables, or the frequencies that it keeps, are rounded: a formula gives others, by up to 0.4 %."""
    model = zoo.load(kind, name).to(dtype)
    exact = sorted(read_model(shared_model(kind, name)).specs(0)[0].rotary.frequencies.tolist())
    between = [math.sqrt(a * b) for a, b in itertools.pairwise(exact)]
    for n, frequency in enumerate(exact):
        for mode in ("drop", "freeze"):
            below = {"low": between[n - 1] if n else 0.0, "mode": mode, "layers": [0]}
            above = {"low": 0.0, "high": between[n] if n < len(between) else None, "mode": mode, "layers": [0]}
            for end, clear in (("low", below), ("high", above)):
                for at in (frequency, 2 * math.pi / (2 * math.pi / frequency)):
                    one, other = (logits(model, limit_frequencies(model, **x)) for x in (clear | {end: at}, clear))
                    assert torch.equal(one, other), (end, at)


def test_float16_keeps_slow_frequencies_coarsely() -> None:
    """In steps of 6e-8, which are more than 0.1 % of them."""
    slow = torch.tensor([1.0, 1e-3, 2.4e-6, 5e-7], dtype=torch.float64)
    rotary = Rotary(slow.half().double(), frequency_dtype=torch.float16)
    for n, frequency in enumerate(slow.tolist()):
        assert within_band(rotary, frequency, frequency).tolist() == [n == i for i in range(4)]
    assert not within_band(rotary, 0.0, 0.0).any()


@pytest.mark.parametrize("name", zoo.names("smollm3", "gemma3"))
def test_layers_of_other_kinds(name: str, shared_model: Any) -> None:
    """Layers that do not rotate are passed over; a band may hold all of one layer and nothing of another."""
    model = shared_model("bridge", name)
    hooks = limit_frequencies(model, high=cut(model), mode="freeze")
    layers = {layer for layer, _ in hooks.pairs}
    assert layers == ({0} if name == "smollm3" else {0, 1})  # Gemma's third layer is slower
    assert (logits(model, hooks) - logits(model, [])).abs().max() > 0.05
