"""Jobs of a sweep: calls by name, checked before one of them runs, and a text that says what each calls."""

from __future__ import annotations

import inspect
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tl_posdisent.sweeps.code_digest import call_arguments, called_function
from tl_posdisent.utils.errors import ArgumentError, brief

Job = Callable[[], Any]
"""A function, or a ``functools.partial`` of one, that returns a table."""

_NOT_IN_NAMES = re.compile(r'[/\\<>:"|?*]|^[. ]')  # some system does not allow these in names of files, or hides them
_LONGEST_NAME = 200  # bytes: a file's name may have 255, its ending included


def describe_jobs(jobs: Any) -> dict[str, str]:
    """Return the text of each job's call by the job's name, or raise ArgumentError.

    >>> from functools import partial
    >>> from tl_posdisent.demo import demo_tokens
    >>> describe_jobs({"short": partial(demo_tokens, length=16)})
    {'short': 'tl_posdisent.demo.demo_model.demo_tokens(length=16)'}
    """
    if not isinstance(jobs, Mapping) or not jobs:
        raise ArgumentError("jobs", f"must be a dict of names and functions, got {brief(jobs)}")
    names_of_files: dict[str, str] = {}
    for name in jobs:
        _check_name(name)
        other = names_of_files.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name:
            raise ArgumentError(
                "jobs",
                f"must have names that differ in more than capitals, got {brief(other)} and {brief(name)}, which are "
                "one file on some systems",
            )
    return {name: _describe_call(name, job) for name, job in jobs.items()}


def _check_name(name: Any) -> None:
    """Raise unless a name is that of a visible file in one folder, on every system."""
    if not isinstance(name, str) or not name or not name.isprintable() or _NOT_IN_NAMES.search(name):
        raise ArgumentError(
            "jobs",
            'must be named as files are: without / \\ < > : " | ? * and no dot or space at the beginning, got '
            f"{brief(name)}: write 'pythia-70m' for 'EleutherAI/pythia-70m'",
        )
    if len(name.encode()) > _LONGEST_NAME:
        raise ArgumentError("jobs", f"must have names of at most {_LONGEST_NAME} bytes, got {brief(name)}")


def _describe_call(name: str, job: Any) -> str:
    """Return the call of a job as a text, with the arguments in the order of the function's signature."""
    function = called_function(job)
    if not inspect.isfunction(function) or "<" in function.__qualname__:  # <lambda>, or a function's <locals>
        raise ArgumentError(
            "jobs",
            "must be functions that a module defines, or functools.partial of one with its arguments, so that a result "
            f"can say what made it, got {brief(name)} with {brief(function)}: write partial(function, argument=value)",
        )
    try:
        arguments = ", ".join(f"{key}={_describe(value)}" for key, value in call_arguments(job).items())
    except TypeError as error:
        raise ArgumentError("jobs", f"must be calls that can be made, got {brief(name)}: {error}") from error
    return f"{_function_name(function)}({arguments})"


def _function_name(function: Any) -> str:
    """Return the name of a function with its module, or with its file if that is a script."""
    file = function.__code__.co_filename
    script = function.__module__ == "__main__" and not file.startswith("<")  # a line of IPython, which has a number
    return f"{Path(file).stem if script else function.__module__}.{function.__qualname__}"


def _describe(value: Any) -> str:
    """Return a text that is equal for equal values in every process, or raise TypeError."""
    match value:
        case np.generic():
            return repr(value.item())
        case None | bool() | int() | float() | str() | Path() | range():
            return repr(value)
        case list():
            return f"[{', '.join(map(_describe, value))}]"
        case tuple():
            return f"tuple([{', '.join(map(_describe, value))}])"
        case dict():
            return f"{{{', '.join(f'{key!r}: {_describe(item)}' for key, item in value.items())}}}"
    if inspect.isfunction(value) and "<" not in value.__qualname__:
        return _function_name(value)
    raise TypeError(
        f"arguments must be numbers, words, paths, None, functions of a module, or lists and dicts of these, got "
        f"{type(value).__name__}: load models and make tensors and hooks inside the function"
    )
