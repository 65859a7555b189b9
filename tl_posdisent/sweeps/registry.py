"""The experiments that a sweep can run, found by their signatures: which arguments each takes, and its table."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from tl_posdisent import experiments, synthetic

from .merging import marginals_by_layer, moments_by_layer


@functools.cache
def experiments_by_name() -> dict[str, Callable[..., Any]]:
    """Public functions of ``(model, tokens, …)`` that return a table, or a result with ``to_frame()``.

    >>> sorted(experiments_by_name())[:3]
    ['additive_substitution', 'additivity', 'attention_ladder']
    """
    found: dict[str, Callable[..., Any]] = {f.__name__: f for f in (marginals_by_layer, moments_by_layer)}
    for room in (experiments, synthetic):
        for name in room.__all__:
            public = getattr(room, name)
            if inspect.isfunction(public) and _gives_table(public):
                found[name] = public
    return found


def _gives_table(function: Callable[..., Any]) -> bool:
    """By its signature alone. Annotations are strings, and not all of their names can be evaluated at run time."""
    signature = inspect.signature(function)
    result = inspect.unwrap(function).__globals__.get(signature.return_annotation)
    gives_table = signature.return_annotation == "pd.DataFrame" or hasattr(result, "to_frame")
    return gives_table and list(signature.parameters)[:2] == ["model", "tokens"]


def experiment_named(name: str) -> Callable[..., Any]:
    """The experiment of this name.

    Raises:
        ValueError: a name that is not an experiment's.
    """
    if name not in experiments_by_name():
        raise ValueError(f"experiment must be one of {', '.join(sorted(experiments_by_name()))}, got {name!r}")
    return experiments_by_name()[name]


def canonical(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON that is the same for the same arguments.

    Raises:
        ValueError: values that JSON cannot hold.
    """
    try:
        return json.dumps(dict(arguments), sort_keys=True, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"arguments must be numbers, words, lists and None, as in JSON, got {arguments!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, range):
        return list(value)
    raise TypeError(f"{type(value).__name__} is none of these")


def takes_seed(name: str) -> bool:
    """Whether the experiment draws random numbers."""
    return bool({"seed", "seeds"} & set(inspect.signature(experiment_named(name)).parameters))


def check_call(name: str, arguments: Mapping[str, Any], seed: int | None) -> None:
    """Raise, before anything is loaded, unless the experiment takes these arguments.

    Raises:
        ValueError: an unknown or missing argument; a seed beside ``seed`` or ``seeds`` in the arguments.
    """
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
