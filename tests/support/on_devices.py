"""Call public functions with their model and tensors on a device."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from support import zoo
from support.public_calls import GOOD, OWN, TOKENS, call, callables
from tl_posdisent.hooks.hook_list import Hooks

NAMES = [
    *("fit_additive", "fit_additive_qk", "fit_attention", "capture", "additivity", "controlled_distance"),
    *("dummy_distance", "swap_positions", "knock_out", "head_ablation", "position_patching", "where_or_what"),
]
"""What a user of a GPU tries first."""
FUNCTIONS = callables()
QUICK = {"layers": [0]}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a function runs."""

    device: str = "cpu"


def has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(has_tensors, value))
    return isinstance(value, Tensor) or (dataclasses.is_dataclass(value) and hasattr(value, "to"))


def moved(value: Any, place: Place) -> Any:
    """The same with all tensors at the place; itself, if there are none."""
    if not has_tensors(value):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(moved(x, place) for x in value)
    return value.to(place.device)


def with_model(name: str) -> bool:
    return "model" in inspect.signature(FUNCTIONS[name]).parameters


@functools.cache
def arguments(name: str) -> dict[str, Any]:
    """What ``call`` gives a function beside its model."""
    own = OWN.get(name, {})
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    own = own | {p: x for p, x in QUICK.items() if p in parameters and p not in own}
    needed = {p for p, x in parameters.items() if x.default is x.empty and p not in ("model", "args", "kwargs")}
    return {p: own[p] if p in own else GOOD.get(p) for p in parameters if p in own or p in needed}


@functools.cache
def a_model(kind: str, place: Place) -> Any:
    """What a function takes."""
    return zoo.load(kind, "llama").to(place.device)


def called(name: str, kind: str, place: Place, *model: Any, **other: Any) -> Any:
    """The function with its model, of a kind, and its tensors at a place, and ``other`` arguments."""
    given = {p: moved(value, place) for p, value in arguments(name).items()} | other
    if with_model(name) and not model:
        model = (a_model(kind, place),)
    return call(FUNCTIONS[name], *model, **given)


def outcome(name: str, kind: str, place: Place, *model: Any, **other: Any) -> Any:
    """What the function returns there; of hooks, and of a model, the logits of a run."""
    model = model or ((a_model(kind, place),) if with_model(name) else ())
    return after_a_run(called(name, kind, place, *model, **other), place, *model)


def after_a_run(found: Any, place: Place, *model: Any) -> Any:
    """The logits of the model with these hooks, or of this model; what is neither, as it is."""
    is_model = hasattr(found, "run_with_hooks")
    if not is_model and not isinstance(found, Hooks):
        return found
    (runs,) = (found,) if is_model else model
    with torch.no_grad():
        return runs.run_with_hooks(moved(TOKENS, place), fwd_hooks=[] if is_model else found)
