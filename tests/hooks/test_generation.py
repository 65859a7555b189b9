"""A KV cache is refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOOLS_FOR_ANY_LENGTH, L

from tl_posdisent.hooks import drop_component, substitute_additive
from tl_posdisent.models.running.forward_pass import Hook

pytestmark = pytest.mark.usefixtures("unchecked")
TOOLS: dict[str, Callable[..., list[Hook]]] = {
    **{tool: make for tool, make in TOOLS_FOR_ANY_LENGTH.items() if tool != "ablation"},
    "component": partial(drop_component, component="key"),
    "additive": substitute_additive,
    "two axes": partial(substitute_additive, axes="two"),
}


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "gemma4"))
def test_a_cache_is_refused_at_the_first_step(kind: str, name: str, shared_reading: Any) -> None:
    reading, prompt = shared_reading(kind, name), zoo.random_tokens(L)[:, :7]
    options = {"do_sample": False, "verbose": False, "stop_at_eos": False, "max_new_tokens": 5}
    for make in TOOLS.values():
        refused = pytest.raises(ValueError, match=r"layer 0 sees 1 of \d tokens: .* use_past_kv_cache=False")
        with torch.no_grad(), reading.model.hooks(fwd_hooks=make(reading)), refused:
            reading.model.generate(prompt, use_past_kv_cache=True, **options)
