"""The experiments that a sweep can run, found by their signatures."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from tl_posdisent import experiments, synthetic


@functools.cache
def experiments_by_name() -> dict[str, Callable[..., Any]]:
    """Public functions of ``(model, tokens, …)`` that return a table, or a result with ``to_frame()``.

    >>> sorted(experiments_by_name())[:3]
    ['additive_substitution', 'additivity', 'attention_ladder']
    """
    public = {name: getattr(room, name) for room in (experiments, synthetic) for name in room.__all__}
    return {name: x for name, x in public.items() if inspect.isfunction(x) and _gives_table(x)}


def _gives_table(function: Callable[..., Any]) -> bool:
    """By its signature alone. Annotations are strings, and not all of their names can be evaluated at run time."""
    signature = inspect.signature(function)
    result = inspect.unwrap(function).__globals__.get(signature.return_annotation)
    gives_table = signature.return_annotation == "pd.DataFrame" or hasattr(result, "to_frame")
    return gives_table and list(signature.parameters)[:2] == ["model", "tokens"]


def experiment_named(name: str) -> Callable[..., Any]:
    """The experiment of this name, or raise ValueError."""
    if name not in experiments_by_name():
        raise ValueError(f"experiment must be one of {', '.join(sorted(experiments_by_name()))}, got {name!r}")
    return experiments_by_name()[name]


def canonical(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON that is the same for the same arguments, or raise ValueError."""
    plain = {name: list(value) if isinstance(value, range) else value for name, value in arguments.items()}
    try:
        return json.dumps(plain, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"arguments must be numbers, words, lists and None, as in JSON, got {arguments!r}") from error


def takes_seed(name: str) -> bool:
    """Whether the experiment draws random numbers."""
    return bool({"seed", "seeds"} & set(inspect.signature(experiment_named(name)).parameters))


def check_call(name: str, arguments: Mapping[str, Any], seed: int | None) -> None:
    """Raise ValueError, before anything is loaded, unless the experiment takes these arguments."""
    if seed is not None and {"seed", "seeds"} & set(arguments):
        raise ValueError(f"seeds must be given once, got seed={seed} and {dict(arguments)} for {name}")
    function = experiment_named(name)
    try:
        inspect.signature(function).bind("model", "tokens", **_arguments(function, arguments, seed))
    except TypeError as error:
        raise ValueError(f"arguments of {name} must be its own, got {dict(arguments)}: {error}") from error


def run_experiment(name: str, model: Any, tokens: Any, arguments: Mapping[str, Any], seed: int | None) -> pd.DataFrame:
    """The experiment's table."""
    function = experiment_named(name)
    result = function(model, tokens, **_arguments(function, arguments, seed))
    table = result if isinstance(result, pd.DataFrame) else result.to_frame()
    return table if isinstance(table.index, pd.RangeIndex) else table.reset_index()


def _arguments(function: Callable[..., Any], arguments: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """With the seed as the function takes it, and without a progress bar."""
    known, given = inspect.signature(function).parameters, dict(arguments)
    if "progress" in known:
        given["progress"] = False
    if seed is not None:
        given |= {"seed": seed} if "seed" in known else {"seeds": [seed]}
    return given
