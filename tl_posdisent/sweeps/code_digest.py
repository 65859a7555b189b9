"""A digest of the code that a job runs, by which a result of an earlier version of a function is recognised.

It is that of the code which was imported, not of the file, which may have been edited since.
"""

from __future__ import annotations

import hashlib
import re
from functools import partial
from types import CodeType, FunctionType
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")  # of an object, which is another one in every process
_EMPTY = "a name that is not assigned yet"


def code_digest(job: Any) -> str:
    """Return a digest that is equal for equal code in every process of one version of Python.

    It covers the function, its defaults, its decorators (``functools.wraps``) and the functions among its arguments,
    but not what these call or read in their modules. Comments and line numbers are not part of it.

    >>> code_digest(code_digest) == code_digest(code_digest), code_digest(code_digest) == code_digest(_text)
    (True, False)
    """
    return hashlib.sha256(_text(job, set()).encode()).hexdigest()


def _text(value: Any, seen: set[int]) -> str:
    """Describe a value: functions by their code, containers by their items, other objects by their repr."""
    match value:
        case FunctionType() | CodeType() if id(value) in seen:  # it calls itself, or was described before
            return value.__name__ if isinstance(value, FunctionType) else value.co_name
        case FunctionType():
            parts = [value.__code__, value.__defaults__, value.__kwdefaults__, *map(_held, value.__closure__ or ())]
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
        case _ if isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):  # a function with a cache
            parts = [wrapped]
        case _:
            return f"{type(value).__qualname__} {_ADDRESS.sub('', repr(value))!r}"
    seen.add(id(value))
    return f"{type(value).__name__} of {[_text(part, seen) for part in parts]}"


def _held(cell: Any) -> Any:
    """Return what a variable of an enclosing function holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
