"""A reading stands for its model: every function gives the numbers of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.public_calls import TOKENS, Function, call, functions
from support.results import assert_same

import tl_posdisent as tp
from tl_posdisent.hooks.hook_list import Hooks

pytestmark = pytest.mark.tl4

# All others take minutes together.
QUICK = {"ablate_heads", "additivity", "choice_scores", "drop_component", "perturb", "phase_noise", "remap_distance"}
OF_MODELS = {f.__name__: f for f in functions() if f.__module__.split(".")[1] not in ("models", "page")}
CLASSES = ["bridge", "hooked"] if zoo.TL_MAJOR < 4 else ["bridge"]
CASES = [
    pytest.param(name, kind, marks=[] if name in QUICK and kind == CLASSES[0] else pytest.mark.slow)
    for kind in CLASSES
    for name in (OF_MODELS if kind == CLASSES[0] else sorted(QUICK))
]


def outcome(function: Function, model: Any) -> Any:
    """What it returns, or the logits under the hooks that it returns, or what it refuses."""
    try:
        made = call(function, model)
    except ValueError as error:
        return str(error)
    if not isinstance(made, Hooks):
        return made
    model = model if isinstance(model, torch.nn.Module) else model.model
    with torch.no_grad():
        return model.run_with_hooks(TOKENS, fwd_hooks=made)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_reading_gives_the_numbers_of_the_model(name: str, kind: str) -> None:
    model = zoo.load(kind, "gemma3")
    expected, found = (outcome(OF_MODELS[name], m) for m in (model, tp.read_model(model)))
    if isinstance(expected, str):
        assert found == expected
    else:
        assert_same(found, expected)
