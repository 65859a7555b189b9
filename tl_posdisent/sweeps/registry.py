"""Any public experiment by its name: what it may be given, and its answer as a table."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd


def canonical(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON that is the same for the same arguments.

    Raises:
        ValueError: what JSON cannot hold.
    """
    try:
        return json.dumps(dict(arguments), sort_keys=True, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"arguments must be numbers, words, lists and None, as in JSON, got {arguments!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, range):
        return list(value)
    raise TypeError(f"{type(value).__name__} is none of these")


def experiment_named(name: str) -> Callable[..., Any]:
    """A public function of a model and tokens that answers with a table.

    Raises:
        ValueError: a name that is no such function's.
    """
    package = importlib.import_module(
        "tl_posdisent"
    )  # by name: its public functions stand on the roof, above this floor
    function = getattr(package, name, None) if name in package.__all__ else None
    if not inspect.isfunction(function) or list(inspect.signature(function).parameters)[:2] != ["model", "tokens"]:
        raise ValueError(f"experiment must be a public function of (model, tokens), such as 'additivity', got {name!r}")
    answer = str(inspect.signature(function).return_annotation)
    if not (answer.endswith("DataFrame") or hasattr(getattr(package, answer, None), "to_frame")):
        raise ValueError(f"experiment must answer with a table, but {name} returns {answer}")
    return function


def takes_seed(function: Callable[..., Any]) -> bool:
    """Whether there is anything random about it."""
    return bool({"seed", "seeds"} & set(inspect.signature(function).parameters))


def check_call(name: str, arguments: Mapping[str, Any], seed: int | None) -> None:
    """Refuse what the experiment would not take, before anything is loaded.

    Raises:
        ValueError: an unknown or missing argument; a seed for what takes none.
    """
    function = experiment_named(name)
    if seed is not None and not takes_seed(function):
        raise ValueError(f"seed must be None for {name}, which takes none, got {seed}")
    if seed is not None and {"seed", "seeds"} & set(arguments):
        raise ValueError(f"seeds must be given once, got seed={seed} and {dict(arguments)} for {name}")
    try:
        inspect.signature(function).bind("model", "tokens", **_arguments(function, arguments, seed))
    except TypeError as error:
        raise ValueError(f"arguments of {name} must be its own, got {dict(arguments)}: {error}") from error


def ask(name: str, model: Any, tokens: Any, arguments: Mapping[str, Any], seed: int | None) -> pd.DataFrame:
    """The experiment's table."""
    function = experiment_named(name)
    answer = function(model, tokens, **_arguments(function, arguments, seed))
    table = answer if isinstance(answer, pd.DataFrame) else answer.to_frame()
    return table if isinstance(table.index, pd.RangeIndex) else table.reset_index()


def _arguments(function: Callable[..., Any], arguments: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """With the seed where the function expects it, and no bar of its own."""
    known, given = inspect.signature(function).parameters, dict(arguments)
    if "progress" in known:
        given["progress"] = False
    if seed is not None:
        given |= {"seed": seed} if "seed" in known else {"seeds": [seed]}
    return given
