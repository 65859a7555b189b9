"""Jobs of a sweep: calls by name, checked before one of them runs, and a text that says what each calls."""

from __future__ import annotations

import inspect
import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tl_posdisent.utils.errors import ArgumentError, brief

Job = Callable[[], Any]
"""A function, or a ``functools.partial`` of one, that returns a table."""

_NOT_IN_NAMES = re.compile(r'[/\\<>:"|?*]|^[. ]')  # some system does not allow them in names of files, or hides these
_LONGEST_NAME = 200  # bytes: files may have 255, which an ending and the name of the unfinished file share


def check_jobs(jobs: Any) -> dict[str, str]:
    """Return the text of each job's call by the job's name.

    Raises:
        ArgumentError: no jobs; a name that cannot be that of a file in the folder, or two of one file; a function or
            an argument that the text cannot describe; arguments that the function does not take.

    Example:
        >>> from functools import partial
        >>> check_jobs({"three": partial(range, 3)})
        Traceback (most recent call last):
        tl_posdisent.utils.errors.ArgumentError: jobs must be ... got 'three' with <class 'range'>: ...
    """
    if not isinstance(jobs, Mapping) or not jobs:
        raise ArgumentError("jobs", f"must be a dict of names and functions, got {brief(jobs)}")
    _check_names(list(jobs))
    return {name: describe_call(name, job) for name, job in jobs.items()}


def _check_names(names: list[Any]) -> None:
    """Raise unless each name is that of one file in one folder, on every file system."""
    files: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or not name or not name.isprintable() or _NOT_IN_NAMES.search(name):
            raise ArgumentError(
                "jobs",
                'must be named as files are: without / \\ < > : " | ? * and no dot or space at the beginning, '
                f"got {brief(name)}: write 'pythia-70m' for 'EleutherAI/pythia-70m'",
            )
        if len(name.encode()) > _LONGEST_NAME:
            raise ArgumentError("jobs", f"must have names of at most {_LONGEST_NAME} bytes, got {brief(name)}")
        file = unicodedata.normalize("NFC", name).casefold()
        if file in files:
            raise ArgumentError(
                "jobs",
                f"must have names that differ in more than capitals, got {brief(files[file])} and {brief(name)}, "
                "which are one file on some systems",
            )
        files[file] = name


def describe_call(name: str, job: Any) -> str:
    """Return the call as a text, with the arguments in the order of the function's signature.

    >>> from tl_posdisent.demo import demo_tokens
    >>> describe_call("short", partial(demo_tokens, length=16))
    'demo_tokens(length=16)'
    """
    function, positional, named = (job.func, job.args, job.keywords) if isinstance(job, partial) else (job, (), {})
    if not inspect.isfunction(function) or "<" in function.__qualname__:
        raise ArgumentError(
            "jobs",
            f"must be functions that a module defines, or functools.partial of one with its arguments, got "
            f"{brief(name)} with {brief(function)}: write partial(function, argument=value), so that the result can "
            "say what made it",
        )
    try:
        bound = inspect.signature(function).bind(*positional, **named)
        arguments = ", ".join(f"{key}={_describe(value)}" for key, value in bound.arguments.items())
    except TypeError as error:
        raise ArgumentError("jobs", f"must be calls that can be made, got {brief(name)}: {error}") from error
    return f"{function.__qualname__}({arguments})"


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
            return f"({''.join(f'{_describe(item)}, ' for item in value)})"
        case dict():
            return f"{{{', '.join(f'{key!r}: {_describe(item)}' for key, item in value.items())}}}"
    if (inspect.isfunction(value) or inspect.isclass(value)) and "<" not in value.__qualname__:
        return value.__qualname__
    raise TypeError(
        f"arguments must be numbers, words, paths, None, or lists and dicts of these, got {type(value).__name__}: load "
        "models and make tensors and hooks inside the function"
    )
