"""Public functions that take a model, found by their signatures, and a good value for each of their arguments."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tl_posdisent
from support import zoo
from support.public import public_names

TOKENS = zoo.random_tokens()
FOLDER = tempfile.TemporaryDirectory()
GOOD: dict[str, Any] = {
    "tokens": TOKENS,
    "text": TOKENS,
    "path": Path(FOLDER.name, "report.html"),
    "layer": 0,
    "positions": torch.arange(12) * 2,
    "distance": 3,
    "distances": lambda d: d,
    "kind": "order",
    "fraction": 0.5,
    "noise": 0.1,
    "question": tl_posdisent.experiments.MultipleChoice(TOKENS[0], [TOKENS[1, :2], TOKENS[1, 2:4]], 1),
    "clean_tokens": TOKENS,
    "corrupted_tokens": TOKENS.flip(1),
    "metric": lambda logits, tokens: logits[:, -1, 5],
    "q_rot": torch.zeros(2, 12, 8, 8),
    "k_rot": torch.zeros(2, 12, 4, 8),
    "scores": torch.zeros(2, 8, 12, 12),
    "hooks": [],
    "heads": [(0, 1)],
    "component": "distance",
    "length": 12,
    "lengths": [0, 4, 12],
    "n_sink": 1,
    "window": 4,
    "distance_ceiling": 4,
    "factor": 2,
    "query": 5,
    "key": 6,
    "by": "uniform",
}
CHEAP = {"progress": False, "rungs": ["distance"], "controls": []}
"""In the place of defaults that take long."""

Function = Callable[..., Any]


def functions(*parameters: str) -> list[Function]:
    """Public functions of a model that have these parameters."""
    public = list(public_names().values())
    found = []
    for function in filter(inspect.isfunction, public):
        named = inspect.signature(function).parameters
        synthetic = [p.annotation for p in named.values()][:1] == ["SyntheticModel"]  # these take no other models
        if list(named)[:1] == ["model"] and set(parameters) <= set(named) and not synthetic:
            found.append(function)
    return found


def call(function: Function, model: Any, **changed: Any) -> Any:
    """With good values for all else; what comes lazily is asked for its first."""
    arguments = dict(changed)
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.default is parameter.empty and name not in arguments:
            assert name in GOOD, f"say in GOOD what a good {name} of {function.__name__} is"
            arguments[name] = GOOD[name]
        elif name in CHEAP:
            arguments.setdefault(name, CHEAP[name])
        elif name == "from_tokens":  # or other positions: one of two
            arguments[name] = TOKENS.flip(1)
    result = function(model, **arguments)
    if isinstance(result, Iterator):
        return next(result)
    enters = hasattr(result, "__enter__") and not isinstance(result, Path)
    return result.__enter__() if enters else result
