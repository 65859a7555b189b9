"""A reading stands for its model: functions give the numbers of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.public_calls import TOKENS, Function, call, functions
from support.results import assert_same

import tl_posdisent as tp
from tl_posdisent.hooks.hook_list import Hooks

FUNCTIONS = {f.__name__: f for f in functions()}
NAMES = ["ablate_heads", "additivity", "drop_component", "perturb", "phase_noise", "remap_distance"]


def outcome(function: Function, model: Any) -> Any:
    """What it returns, or the logits under the hooks that it returns."""
    made = call(function, model)
    if not isinstance(made, Hooks):
        return made
    model = model if isinstance(model, torch.nn.Module) else model.model
    with torch.no_grad():
        return model.run_with_hooks(TOKENS, fwd_hooks=made)


@pytest.mark.parametrize("kind", zoo.KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_reading_gives_the_numbers_of_the_model(name: str, kind: str) -> None:
    model = zoo.load(kind, "gemma3")
    expected, found = (outcome(FUNCTIONS[name], m) for m in (model, tp.read_model(model)))
    assert_same(found, expected)
