"""The shell and Python name interventions alike: functions of ``tl_posdisent.hooks`` and their arguments."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pandas as pd
import pytest
from support import zoo

import tl_posdisent as tp
from tl_posdisent.sweeps.jobs import experiments_by_name, run_experiment

TOKENS = zoo.random_tokens(length=12, batch=2)
MORE: dict[str, dict[str, Any]] = {"length_generalization": {"lengths": [2, 8, 12]}, "output_projection": {"start": 2}}
TAKES = {
    name: argument
    for name, function in experiments_by_name().items()
    for argument in ("interventions", "hooks")
    if argument in inspect.signature(function).parameters
}


def arguments(name: str, intervention: Any) -> dict[str, Any]:
    return MORE.get(name, {}) | {TAKES[name]: {"it": intervention} if TAKES[name] == "interventions" else intervention}


def test_there_are_experiments_with_interventions() -> None:
    assert {"head_effects", "length_generalization"} <= set(TAKES)


@pytest.mark.parametrize("name", TAKES)
def test_by_name_is_by_hooks(name: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    by_hooks = run_experiment(name, model, TOKENS, arguments(name, tp.dummy_distance(model, 2)), None)
    call = json.loads(json.dumps(("dummy_distance", {"distance": 2})))  # as the shell and sweeps give it
    pd.testing.assert_frame_equal(run_experiment(name, model, TOKENS, arguments(name, call), None), by_hooks)
    other = run_experiment(name, model, TOKENS, arguments(name, ("dummy_distance", {"distance": 5})), None)
    assert not other.equals(by_hooks)


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("dummy_distances", "hooks must be a list of hooks, or one of ablate_heads, .* by name, got 'dummy_distances'"),
        (["dummy_distance", 5], r"hooks must be a name, or a name and a dictionary of arguments, got \['dummy_"),
        (["dummy_distance", {"distances": 5}], "hooks must have the arguments of dummy_distance, got .*distances"),
    ],
)
def test_no_intervention_of_this_name(name: str, given: Any, problem: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    with pytest.raises(ValueError, match=f"^({TAKES[name]} must be hooks by name; 'it': )?{problem}"):
        run_experiment(name, model, TOKENS, arguments(name, given), None)
