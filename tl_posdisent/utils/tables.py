"""Index columns of result tables, named as TransformerLens lays its tensors out."""

from __future__ import annotations

import math
from collections.abc import Sequence


def index_columns(shape: Sequence[int], *, pooled: bool = False, repeat: int = 1) -> dict[str, list[int]]:
    """Columns that spell out the leading index of flattened values.

    One axis is ``head``, two are ``batch`` and ``head``, as in ``cache["attn_scores", layer]``; more are ``axis_0``,
    ``axis_1`` …. With ``pooled`` the first axis of the scores is gone from ``shape``. Each index stands ``repeat``
    times.

        >>> index_columns((2, 2))
        {'batch': [0, 0, 1, 1], 'head': [0, 1, 0, 1]}
    """
    n = len(shape) + pooled
    names = {1: ["head"], 2: ["batch", "head"]}.get(n, [f"axis_{i}" for i in range(n)])[pooled:]
    columns, inner = {}, math.prod(shape)
    for name, size in zip(names, shape, strict=True):
        outer, inner = math.prod(shape) // inner, inner // size
        columns[name] = [i for _ in range(outer) for i in range(size) for _ in range(inner * repeat)]
    return columns
