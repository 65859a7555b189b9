"""Numbers with their nouns: ``1 layer``, ``5 layers``."""

from __future__ import annotations


def plural(n: int, one: str, several: str | None = None) -> str:
    """Format a number and its noun; ``several`` for a noun whose plural is not formed by an s.

    >>> plural(1, "layer"), plural(0, "layer"), plural(2, "random copy", "random copies")
    ('1 layer', '0 layers', '2 random copies')
    """
    return f"{n} {one if n == 1 else several or one + 's'}"
