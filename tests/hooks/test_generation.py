"""A KV cache is refused with the way out."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support import zoo

from tl_posdisent import dummy_distance, lambda_mask, limit_frequencies, position_interpolation, swap_positions
from tl_posdisent.hooks import drop_component, phase_noise, substitute_additive

pytestmark = pytest.mark.usefixtures("unchecked")
TOOLS = [
    partial(swap_positions, positions=lambda p: (7 * p) % 5),
    partial(dummy_distance, distance=5),
    partial(position_interpolation, factor=3),
    partial(limit_frequencies, low=0.05),
    partial(phase_noise, noise=0.7),
    partial(lambda_mask, sinks=1, window=4, distance_ceiling=2),
    partial(drop_component, component="key"),
    substitute_additive,
    partial(substitute_additive, axes="two"),
]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "gemma4"))
def test_a_cache_is_refused_at_the_first_step(kind: str, name: str, shared_reading: Any) -> None:
    reading, prompt = shared_reading(kind, name), zoo.random_tokens(7)
    options = {"do_sample": False, "verbose": False, "stop_at_eos": False, "max_new_tokens": 5}
    for make in TOOLS:
        refused = pytest.raises(ValueError, match=r"layer 0 sees 1 of \d tokens: .* use_past_kv_cache=False")
        with torch.no_grad(), reading.model.hooks(fwd_hooks=make(reading)), refused:
            reading.model.generate(prompt, use_past_kv_cache=True, **options)
