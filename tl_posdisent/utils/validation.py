"""Validate arguments. Errors are ``ValueError`` with the argument's name, what is needed, and what was given.

Imports no torch, so that the command line can refuse an argument at once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import fields
from numbers import Real
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tl_posdisent.utils.errors import ArgumentError, brief
from tl_posdisent.utils.labels import from_label
from tl_posdisent.utils.words import did_you_mean

_Choice = TypeVar("_Choice", bound=str)


def shown(value: Any) -> str:
    """Describe a value for an error: its repr, cut to 120 characters; for a tensor or an array, type and shape only.

    >>> import torch
    >>> shown("far"), shown(torch.ones(2, 3))
    ("'far'", 'a Tensor of shape (2, 3)')
    """
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and shape != ():
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    return brief(value)


def printable(text: str) -> str:
    """Escape non-printable characters of a text, for errors that quote a file.

    >>> printable("blk.0\\x1b[2J\\n")
    'blk.0\\\\x1b[2J\\\\n'
    """
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in text)


_LONGEST_LINE = 600  # limit in characters for an error that may quote a file


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, printable, without the lists that transformers and torch append.

    A line that ends in a colon only announces the reason, so those after it are joined to it.
    """
    lines = [x.strip() for x in str(error).strip().splitlines()] or [type(error).__name__]
    line = printable(" ".join(lines) if lines[0].endswith(":") else lines[0])
    return line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + "…"


def is_integer(value: Any) -> bool:
    """Say whether ``value`` is an integer of Python, numpy or a torch scalar; True and False are not.

    >>> import numpy as np, torch
    >>> [is_integer(x) for x in (3, np.int64(3), torch.tensor(3), True, 3.0, "3")]
    [True, True, True, False, False, False]
    """
    truth = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    if truth or getattr(value, "ndim", 0) != 0:
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def is_number(value: Any) -> bool:
    """Say whether ``value`` is a real number of Python or numpy that a float can hold; True and False are not."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:  # an integer or a fraction beyond the largest float
        return False
    return True


_TOO_LARGE = 2**63  # tensors hold integers below it


def check_integer(name: str, value: Any, least: int, most: int | None = None, why: str = "") -> int:
    """Return ``value`` as an int, or raise unless it is one from ``least`` to ``most``. ``why`` explains the bound.

    Integers that no tensor can hold, from 2**63 on, are refused in any case.

    >>> check_integer("step", 12, 0, 10, why="the steps of this run")
    Traceback (most recent call last):
    tl_posdisent.utils.errors.ArgumentError: step must be an integer from 0 to 10 (the steps of this run), got 12
    """
    if not is_integer(value) or not least <= operator.index(value) <= (_TOO_LARGE - 1 if most is None else most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        if most is None and is_integer(value) and operator.index(value) >= _TOO_LARGE:
            bound += " and below 2**63"
        raise ArgumentError(name, f"must be an integer {bound}{why and f' ({why})'}, got {shown(value)}")
    return operator.index(value)


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return ``value``, or raise unless it is a finite real number within these bounds."""
    if not (is_number(value) and math.isfinite(value) and least <= value <= most and above < value < below):
        bounds = {"of at least": least, "above": above, "at most": most, "below": below}
        words = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))
        raise ArgumentError(name, f"must be a finite number{words and ' ' + words}, got {shown(value)}")
    return float(value)


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise unless ``value`` is one of the choices.

    >>> check_choice("mode", "omit", ("drop", "freeze"))
    Traceback (most recent call last):
    tl_posdisent.utils.errors.ArgumentError: mode must be 'drop' or 'freeze', got 'omit'

    The nearest choice comes before the list of all:

    >>> check_choice("mode", "frezee", ("drop", "freeze"))
    Traceback (most recent call last):
    tl_posdisent.utils.errors.ArgumentError: mode cannot be 'frezee': did you mean 'freeze'? It must be 'drop' ...
    """
    choices = list(choices)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        words = [repr(choice) for choice in choices]
        listed = " or ".join(words) if len(words) < 3 else ", ".join(words[:-1]) + " or " + words[-1]
        raise ArgumentError(name, _unknown(value, choices, f"be {listed}", shown(value)))


def _unknown(value: Any, choices: Sequence[Any], needed: str, given: str) -> str:
    """Say what is needed: after the choice that is nearest to an unknown value, or before what was given."""
    near = did_you_mean(value, [choice for choice in choices if isinstance(choice, str)])
    return f"cannot be {value!r}{near} It must {needed}" if near else f"must {needed}, got {given}"


def check_subset(name: str, chosen: Any, choices: Iterable[_Choice]) -> list[_Choice]:
    """Validate a choice or a collection of different choices, and return a list."""
    choices = list(choices)
    picked = list[Any]([chosen] if isinstance(chosen, str) else chosen) if isinstance(chosen, Iterable) else None
    known = picked is not None and all(isinstance(x, str) and x in choices for x in picked)
    if not known or isinstance(chosen, Mapping) or len(set(picked or ())) < len(picked or ()):
        unknown = next((x for x in picked or () if isinstance(x, str) and x not in choices), None)
        needed = f"be some of {', '.join(choices)}, each once"
        raise ArgumentError(name, _unknown(unknown, choices, needed, shown(chosen)))
    return picked or []


def check_flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(name, f"must be True or False, got {shown(value)}")


def check_fields(config: Any, *, least: Mapping[str, int] | None = None) -> None:
    """Validate the fields of a dataclass by annotation; integers are at least 1, or what ``least`` says for a name."""
    hints = get_type_hints(type(config))
    for name in (field.name for field in fields(config)):
        kind, value, parts = hints[name], getattr(config, name), get_args(hints[name])
        optional = int in parts and type(None) in parts
        if kind is bool:
            check_flag(name, value)
        elif get_origin(kind) is Literal:
            check_choice(name, value, parts)
        elif kind is int or (optional and value is not None):
            check_integer(name, value, (least or {}).get(name, 1))


def check_seed(seed: Any) -> int:
    """Return ``seed`` as an int, or raise unless it is an integer from 0 to 2**63 - 1."""
    return check_integer("seed", seed, 0)


_MOST_SEEDS = 1_000_000  # a list of more would fill the memory before the first is used


def check_seeds(seeds: Any, least: Literal[0, 1] = 1) -> list[int]:
    """Validate seeds, given as a number of seeds (0, 1, 2 …) or a list of different seeds, and return a list."""
    if is_integer(seeds):
        return list(range(check_integer("seeds", seeds, least, _MOST_SEEDS)))
    if isinstance(seeds, range) and seeds[_MOST_SEEDS:]:
        raise ArgumentError("seeds", f"must be at most {_MOST_SEEDS}, got {seeds}")
    if not least and isinstance(seeds, Sized) and not isinstance(seeds, (str, bytes)) and not len(seeds):
        return []
    return check_distinct("seeds", seeds, check_seed, "a number of seeds or a list of seeds")


def check_distinct(name: str, values: Any, check: Callable[[Any], Any], what: str = "a sequence") -> list[Any]:
    """Apply ``check`` to each of at least one value, all different; ``what`` describes the values in errors."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ArgumentError(name, f"must be {what}, got {shown(values)}")
    checked = [check(value) for value in values]
    if not checked or len(set(checked)) < len(checked):
        raise ArgumentError(name, f"must name at least one and none twice, got {shown(checked)}")
    return checked


def check_indices(name: str, chosen: Any, n: int) -> list[int]:
    """Validate indices into ``n`` items, at least one and none twice; None means all, negative ones count from the end.

    >>> check_indices("layers", None, 3), check_indices("layers", -1, 3), check_indices("layers", range(2), 3)
    ([0, 1, 2], [2], [0, 1])
    >>> check_indices("layers", [3], 3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tl_posdisent.utils.errors.ArgumentError: layers must be integers from 0 to 2 (or from -3 to -1, ...), got 3
    """
    if chosen is None:
        return list(range(n))
    chosen = [chosen] if is_integer(chosen) else listed(name, chosen)
    if isinstance(chosen, (str, bytes, Mapping)) or not isinstance(chosen, Iterable):
        raise ArgumentError(name, f"must be an integer or a sequence of integers, got {shown(chosen)}")
    indices = list(chosen)
    for x in indices:
        if not is_integer(x) or not -n <= operator.index(x) < n:
            raise ArgumentError(
                name, f"must be integers from 0 to {n - 1} (or from {-n} to -1, counted from the end), got {shown(x)}"
            )
    picked = [operator.index(x) % n for x in indices]
    if not picked or len(set(picked)) < len(picked):
        raise ArgumentError(name, f"must name at least one and none twice, got {shown(indices)}")
    return picked


def listed(name: str, chosen: Any) -> Any:
    """Convert an iterable of indices to a list, which can be iterated twice; return anything else unchanged.

    Arrays and tensors become lists of integers, or of pairs, also where they are entries of a list. A tuple stays one:
    ``check_heads`` refuses a tuple of two integers.

    >>> import torch
    >>> listed("heads", iter([0, 3])), listed("heads", torch.tensor([[1, 3], [0, 0]]))
    ([0, 3], [[1, 3], [0, 0]])
    """
    if hasattr(chosen, "tolist"):
        return chosen.tolist()
    if not isinstance(chosen, Iterable) or isinstance(chosen, (str, bytes, Mapping)):
        return chosen
    entries = [listed(name, x) for x in chosen]
    return tuple(entries) if isinstance(chosen, tuple) else entries


def head_label(layer: int, head: int) -> str:
    """Return a label such as ``"L16H0"``, for tables, titles and errors."""
    return f"L{layer}H{head}"


def check_heads(
    layers: Any, heads: Any, n_layers: int, n_heads: int, *, default: Iterable[int] | None = None
) -> dict[int, list[int]]:
    """Validate a choice of layers and heads, and return the heads of each chosen layer, layers ascending.

    Args:
        layers: None for all, an integer, or integers.
        heads: None for all heads of these layers; an integer or a list of integers, the same heads in each of them; or
            single heads, ``"L16H0"`` or a list of such labels or of pairs ``(layer, head)``, which imply their layers;
            these must be in ``layers``, if given.
        n_layers, n_heads: numbers of layers and heads of the model.
        default: layers to use for ``layers=None`` if ``heads`` does not imply any; default all.

    >>> check_heads(None, [(4, 2), "L0H1", (4, 0)], n_layers=5, n_heads=8)
    {0: [1], 4: [2, 0]}
    """
    refuse_pair(heads)
    heads = listed("heads", heads)
    chosen = sorted(check_indices("layers", layers, n_layers))
    in_each = chosen if layers is not None or default is None else sorted(default)
    if heads is None or is_integer(heads):
        return {layer: check_indices("heads", heads, n_heads) for layer in in_each}
    entries: Any = [heads] if isinstance(heads, str) else heads
    if isinstance(entries, (bytes, Mapping)) or not isinstance(entries, Iterable):
        raise ArgumentError(
            "heads", f'must be integers, pairs (layer, head) or labels such as "L16H0", got {shown(heads)}'
        )
    given = list(entries)
    entries = [from_label(x) for x in given]
    if not any(_is_pair(x) for x in entries):
        return {layer: check_indices("heads", entries, n_heads) for layer in in_each}
    by_layer: dict[int, list[int]] = {}
    for x, as_given in zip(entries, given, strict=True):
        if not _is_pair(x) or not (-n_layers <= x[0] < n_layers and -n_heads <= x[1] < n_heads):
            raise ArgumentError(
                "heads",
                f"must be L0H0 to {head_label(n_layers - 1, n_heads - 1)}, as labels or as pairs (layer, head) "
                f"(or negative, counted from the end), got {shown(as_given)}",
            )
        by_layer.setdefault(operator.index(x[0]) % n_layers, []).append(operator.index(x[1]) % n_heads)
    if any(len(set(of_layer)) < len(of_layer) for of_layer in by_layer.values()):
        raise ArgumentError("heads", f"must name none twice, got {shown(entries)}")
    if not set(by_layer) <= set(chosen):
        raise ArgumentError("heads", f"must lie within layers={shown(layers)}, got {shown(entries)}")
    return dict(sorted(by_layer.items()))


def refuse_pair(heads: Any) -> None:
    """Raise for a tuple of two integers: one head, ``(layer, head)``, or the same two heads in each layer?

    >>> refuse_pair((1, 4))  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    tl_posdisent.utils.errors.ArgumentError: heads must not be a tuple of two integers, got (1, 4): write [(1, 4)] for
    head 4 of layer 1, or [1, 4] for heads 1 and 4 of each chosen layer
    """
    if isinstance(heads, tuple) and _is_pair(heads):
        layer, head = map(operator.index, heads)
        raise ArgumentError(
            "heads",
            f"must not be a tuple of two integers, got ({layer}, {head}): write [({layer}, {head})] for head {head} of "
            f"layer {layer}, or [{layer}, {head}] for heads {layer} and {head} of each chosen layer",
        )


def _is_pair(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str) and len(x) == 2 and all(map(is_integer, x))
