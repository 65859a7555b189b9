"""Values of options that are typed as text: numbers, ranges, labels of heads, and ``--set NAME=VALUE``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

from tl_posdisent.utils.errors import brief

_MOST_LISTED = 100_000
_RANGE = re.compile(r"(\d{1,6})-(\d{1,6})")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


def whole_numbers(option: str, text: str | None, others: str = "") -> list[int] | None:
    """Parse ``"0,3-5"`` to ``[0, 3, 4, 5]``; None stays None. ``others`` describes the option's other values in errors.

    >>> whole_numbers("layers", "0,3-5")
    [0, 3, 4, 5]
    >>> whole_numbers("seeds", "5-3")
    Traceback (most recent call last):
        ...
    ValueError: --seeds must be ranges from a smaller to a larger number, such as 3-5, got '5-3'
    """
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        needed = f"{others}numbers or ranges such as 0-3, separated by commas without spaces"
        raise ValueError(f"--{option} must be {needed}, got {brief(text)}")
    return _listed(option, text.split(","))


def layer_numbers(text: str | None) -> list[int] | Literal["global", "local"] | None:
    """Parse ``--layers``: numbers as in ``whole_numbers``; ``"global"`` and ``"local"`` stay unchanged.

    >>> layer_numbers("0,3-5"), layer_numbers("local")
    ([0, 3, 4, 5], 'local')
    """
    match text:
        case "global" | "local":
            return text
        case _:
            return whole_numbers("layers", text, "global, local, or ")


def head_numbers(text: str | None) -> list[Any] | None:
    """Parse ``"L4H2,L0H5"`` to labels that the library takes, or numbers of heads as in ``whole_numbers``.

    >>> head_numbers("L4H2,L0H5"), head_numbers("0,2-4")
    (['L4H2', 'L0H5'], [0, 2, 3, 4])
    """
    if text is not None and re.fullmatch(r"L\d{1,6}H\d{1,6}(,L\d{1,6}H\d{1,6})*", text):
        return text.split(",")
    return whole_numbers("heads", text, "labels such as L4H2, or ")


def checkpoint_steps(text: str | None) -> list[int] | Literal["all"] | None:
    """Parse ``--checkpoints``: numbers as in ``whole_numbers``; ``"all"`` stays unchanged."""
    return "all" if text == "all" else whole_numbers("checkpoints", text, "all, or ")


def part_numbers(text: str | None) -> tuple[int, int] | None:
    """Parse ``"3/8"``, the third of eight parts, to ``(3, 8)``; None stays None.

    >>> part_numbers("3/8")
    (3, 8)
    """
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,6}/\d{1,6}", text):
        raise ValueError(f"--part must be I/N, such as 3/8 for the third of eight parts, got {brief(text)}")
    number, parts = map(int, text.split("/"))
    return number, parts


def standard_deviation(text: str) -> float | Literal["config"]:
    """Parse ``--std`` to a number; ``"config"`` stays unchanged.

    >>> standard_deviation("0.02"), standard_deviation("config")
    (0.02, 'config')
    """
    if text == "config":
        return "config"
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"--std must be a number above 0, or config, got {brief(text)}")
    return number


def settings(given: Iterable[str] | None) -> dict[str, Any]:
    """Parse ``--set`` options, ``NAME=VALUE`` each, to arguments of an experiment.

    >>> settings(["layers=0-2,4", "unit=word"])
    {'layers': [0, 1, 2, 4], 'unit': 'word'}
    """
    found: dict[str, Any] = {}
    for pair in given or ():
        name, sign, text = pair.partition("=")
        if not sign or not name or not text:
            raise ValueError(f"--set must be NAME=VALUE, such as layers=0-3, got {brief(pair)}")
        if name in found:
            raise ValueError(f"--set must name each argument once, got {name} twice")
        found[name] = value(f"set {name}", text)
    return found


def value(option: str, text: str) -> Any:
    """Parse a number, a truth value, None, a name, a list of them with commas and without spaces, or JSON.

    >>> [value("set x", text) for text in ("0-2,5", "0,0.5", "L4H2,L0H5", "false", "None", "mean", '["a", [1, 2]]')]
    [[0, 1, 2, 5], [0, 0.5], ['L4H2', 'L0H5'], False, None, 'mean', ['a', [1, 2]]]
    """
    if text[0] in '[{"' or re.search(r"\s", text):
        return _json(option, text)
    parts = text.split(",")
    if "" in parts:
        raise ValueError(f"--{option} must have a value between commas, got {brief(text)}")
    return _listed(option, parts) if len(parts) > 1 or _RANGE.fullmatch(text) else _scalar(text)


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or lists in lists in lists …
        raise ValueError(
            f"--{option} must be JSON if it has spaces or brackets, such as [0, 1] or "
            f'{{"mode": "mean"}}, got {brief(text)}: {error}'
        ) from error


def _listed(option: str, parts: list[str]) -> list[Any]:
    """Return the values of the parts, with all numbers of a range such as ``3-5``."""
    found: list[Any] = []
    for part in parts:
        ends = _RANGE.fullmatch(part)
        numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else [_scalar(part)]
        if not numbers:
            raise ValueError(
                f"--{option} must be ranges from a smaller to a larger number, such as 3-5, got {brief(part)}"
            )
        if len(found) + len(numbers) > _MOST_LISTED:
            raise ValueError(f"--{option} must be at most {_MOST_LISTED} numbers, got more")
        found += numbers
    return found


def _scalar(text: str) -> Any:
    """Convert a word to a truth value, None or a number if it is one; anything else is a name."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) < 100 and re.fullmatch(r"-?\d+", text):
        return int(text)
    if len(text) < 100 and re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.IGNORECASE):
        return float(text)
    return text
