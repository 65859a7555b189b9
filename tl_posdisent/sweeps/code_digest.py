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

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")  # of an object, which is another one in every process
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
    function, given, named = (job.func, job.args, job.keywords) if isinstance(job, partial) else (job, (), {})
    arguments = inspect.signature(function).bind(*given, **named).arguments  # in one order, however they are given
    parts = [function, *_functions([*arguments.values()])]
    return hashlib.sha256(_text(parts, set()).encode()).hexdigest()


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
        case _:
            return f"{type(value).__qualname__} {_ADDRESS.sub('', repr(value))!r}"
    seen.add(id(value))
    return f"{type(value).__name__} of {[_text(part, seen) for part in parts]}"


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
