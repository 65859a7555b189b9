"""A digest of the code that a job runs, by which a result of an earlier version of a function is recognised.

It is that of the code which was imported, not of the file, which may have been edited since.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import re
from collections.abc import Iterator
from functools import partial
from pathlib import PurePath
from types import CodeType, FunctionType, NoneType
from typing import Any

# Of an object, which is another one in every process; beartype writes it into names of parameters.
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+|(?<=__beartype_object_)\d+")
_FIXED = (FunctionType, partial, NoneType, int, float, complex, str, bytes, PurePath, range, tuple, frozenset)


def code_digest(job: Any) -> str:
    """Return a digest that is equal for equal code in every process of one version of Python.

    It covers the function, its defaults, its decorators (``functools.wraps``) with their numbers, words and functions,
    and the functions among its arguments, but not what these call or read in their modules. Comments and line numbers
    are not part of it.

    >>> def double(x=1): return 2 * x
    >>> def treble(x=1): return 3 * x
    >>> code_digest(double) == code_digest(partial(double, 4)), code_digest(double) == code_digest(treble)
    (True, False)
    """
    parts = [called_function(job), *_functions([*call_arguments(job).values()])]
    return hashlib.sha256(_text(parts, set()).encode()).hexdigest()


def called_function(job: Any) -> Any:
    """Return the function of a job."""
    return job.func if isinstance(job, partial) else job


def call_arguments(job: Any) -> dict[str, Any]:
    """Return the arguments of a job by name, in one order, however they are given; raise TypeError if it has others.

    A decorator may take other arguments than the function that it wraps, whose signature it shows.
    """
    given, named = (job.args, job.keywords) if isinstance(job, partial) else ((), {})
    try:
        return inspect.signature(called_function(job)).bind(*given, **named).arguments
    except TypeError as error:
        try:
            return inspect.signature(called_function(job), follow_wrapped=False).bind(*given, **named).arguments
        except TypeError:
            raise error from None


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the functions in an argument, in their order."""
    match value:
        case FunctionType():
            yield value
        case list() | tuple():
            for item in value:
                yield from _functions(item)
        case dict():
            yield from _functions([*value.values()])


def _text(value: Any, seen: set[int]) -> str:
    """Describe a value: functions by their code, containers by their items, other objects by their repr."""
    match value:
        case FunctionType() | CodeType() if id(value) in seen:  # it calls itself, or was described before
            return value.__name__ if isinstance(value, FunctionType) else value.co_name
        case FunctionType():
            parts = [value.__code__, value.__defaults__, value.__kwdefaults__, *_enclosed(value)]
            parts.append(vars(value).get("__wrapped__"))
        case CodeType():
            parts = [value.co_code, value.co_exceptiontable, value.co_flags, value.co_consts]
            parts += [value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount]
            parts += [value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars]
        case partial():
            parts = [value.func, value.args, value.keywords]
        case dict():
            parts = [*value.items()]
        case list() | tuple():
            parts = [*value]
        case set() | frozenset():
            return f"{type(value).__name__} of {sorted(_text(item, seen) for item in value)}"
        case _ if _is_cached(value):
            parts = [value.__wrapped__]
        case _ if hasattr(value, "tolist") and not isinstance(value, type):  # an array: its repr leaves out most
            parts = [str(getattr(value, "dtype", "")), value.tolist()]
        case _:
            return f"{type(value).__qualname__} {_ADDRESS.sub('', repr(value))!r}"
    seen.add(id(value))
    content = "\n".join(_text(part, seen) for part in parts)
    return f"{type(value).__name__} of {hashlib.sha256(content.encode()).hexdigest()}"  # of one length, however deep


def _enclosed(function: FunctionType) -> list[Any]:
    """Return what a function reads of an enclosing one, such as a decorator.

    What may change while the function runs, such as a counter or a cache, is no part of its code.
    """
    code = function.__code__
    changed = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF"}
    named = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return [_held(cell) for name, cell in named if name not in changed]


def _held(cell: Any) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:
        return "a name that is not assigned yet"
    return value if isinstance(value, _FIXED) or _is_cached(value) else type(value)


def _is_cached(value: Any) -> bool:
    """Say whether this is a function with a cache, as ``functools.lru_cache`` makes."""
    return isinstance(getattr(value, "__wrapped__", None), FunctionType)
