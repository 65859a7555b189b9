"""Words of messages: numbers with their nouns, ``1 layer``, ``5 layers``, and the nearest to a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def plural(n: int, one: str, several: str | None = None) -> str:
    """Format a number and its noun; ``several`` for a noun whose plural is not formed by an s.

    >>> plural(1, "layer"), plural(0, "layer"), plural(2, "random copy", "random copies")
    ('1 layer', '0 layers', '2 random copies')
    """
    return f"{n} {one if n == 1 else several or one + 's'}"


def did_you_mean(name: object, *groups: Iterable[str], shown: Callable[[str], str] = str, otherwise: str = "") -> str:
    """Return the end of an error about an unknown name: the nearest name of the first group that has one near.

    Args:
        shown: what to print for that name.
        otherwise: what to do where no name is near.

    >>> did_you_mean("SmolM2", ["smollm2", "gpt2"]), did_you_mean("x", ["gpt2"]), did_you_mean(None, ["none"])
    (": did you mean 'smollm2'?", '', '')
    """
    for group in groups:
        known = {known_name.lower(): known_name for known_name in group}
        if isinstance(name, str) and (near := difflib.get_close_matches(name.lower(), known, 1, 0.7)):
            return f": did you mean {shown(known[near[0]])!r}?"
    return f": {otherwise}" if otherwise else ""
