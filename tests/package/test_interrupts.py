"""Ctrl-C in a run: the model is as it was to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.public_calls import call
from support.untouched import state

import tl_posdisent as tp

pytestmark = pytest.mark.usefixtures("unchecked")
# They run whole passes, end some, skip layers, take gradients, and lengthen tables.
RUN = [tp.additivity, tp.head_patching, tp.head_effects, tp.experiments.length_generalization]


@pytest.mark.parametrize("function", RUN, ids=lambda function: function.__name__)
def test_an_interrupted_run_leaves_the_model_as_it_was(function: Any) -> None:
    """In the first pass, in the middle and in the last, in the first layer."""
    model = zoo.bridge("llama-gqa")
    before, weights = state(model), [x.detach().clone() for x in model.state_dict().values()]
    point = model.blocks[0].attn.hook_z

    def run(interrupted: int | None) -> int:
        calls = 0

        def count(z: torch.Tensor, hook: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == interrupted:
                raise KeyboardInterrupt

        point.add_hook(count, is_permanent=True)
        try:
            call(function, model)
        finally:
            point.remove_hooks("fwd", including_permanent=True)
        return calls

    calls = run(None)
    for at in sorted({1, (calls + 1) // 2, calls}):
        with pytest.raises(KeyboardInterrupt):
            run(at)
        assert state(model) == before, at
    assert all(torch.equal(a, b) for a, b in zip(weights, model.state_dict().values(), strict=True))
