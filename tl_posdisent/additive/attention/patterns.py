"""Attention patterns a block at a time: from scores, from a pattern, or from queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.attention.layout import Layout, to_batch
from tl_posdisent.additive.cells import Cells
from tl_posdisent.additive.score_checks import refuse_masking_values, refuse_non_finite, refuse_patterns

_BLOCK = 2**20  # cells that are read at a time
_ROWS = 64  # queries that are read together at least, if need be of one system at a time
_HUGE = 1e30  # no score comes near

# Systems, queries, keys, and the pattern of these; each call is a pass over it.
Block = tuple[slice, slice, slice, Float64[Tensor, "system text row column"]]
Pattern = Callable[[], Iterator[Block]]


def _blocks(layout: Layout, n_system: int, n_text: int) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Blocks of systems and queries, the keys that they see, and which of the cells count."""
    width = n_text * layout.n_key
    rows = min(layout.n_query, max(1, _BLOCK // (width * n_system), min(_ROWS, 4 * _BLOCK // width)))
    at_once = max(1, _BLOCK // (width * rows))
    for system in range(0, n_system, at_once):
        systems = slice(system, min(system + at_once, n_system))
        chosen = layout.select(systems)
        for row in range(0, layout.n_query, rows):
            some = slice(row, min(row + rows, layout.n_query))
            columns = layout.columns(some)
            if columns.stop > columns.start:
                yield systems, some, columns, chosen.inside(some, columns)


def pattern_of_scores(layout: Layout, scores: Tensor) -> Pattern:
    """The softmax of scores that are arranged by system and text."""
    return lambda: (
        (systems, rows, columns, _softmax(scores[systems][..., rows, columns].to(torch.float64, copy=True), inside))
        for systems, rows, columns, inside in _blocks(layout, *scores.shape[:2])
    )


def pattern_of_vectors(layout: Layout, q: Tensor, k: Tensor, scale: float) -> Pattern:
    """The softmax of inner products of queries and keys that are arranged by system and text."""
    return lambda: (
        (s, rows, columns, _softmax((scale * q[s][..., rows, :].double()) @ k[s][..., columns, :].double().mT, inside))
        for s, rows, columns, inside in _blocks(layout, *q.shape[:2])
    )


def _softmax(x: Tensor, inside: Tensor) -> Tensor:
    """In place; 0 where no cell counts."""
    x = x.masked_fill_(~inside, -torch.inf)
    x = x.sub_(x.amax(-1, keepdim=True).clamp_min(-_HUGE)).exp_()
    return x.div_(x.sum(-1, keepdim=True).clamp_min(1))


def pattern_of_pattern(layout: Layout, pattern: Tensor) -> Pattern:
    """A pattern, arranged by system and text, with rows that add up to 1 exactly.

    Its blocks raise ValueError where that is not so to the precision of its dtype.
    """
    tolerance = 1e-2 if pattern.dtype in (torch.float16, torch.bfloat16) else 1e-3

    def blocks() -> Iterator[Block]:
        for systems, rows, columns, inside in _blocks(layout, *pattern.shape[:2]):
            x = pattern[systems][..., rows, columns].double().masked_fill(~inside, 0.0)
            total, used = x.sum(-1), inside.any(-1)
            if not bool((x >= 0).all()) or not bool((((total - 1).abs() <= tolerance) | ~used).all()):
                raise ValueError(
                    "pattern must be attention after the softmax: not negative, and rows that add up to 1 within the "
                    f"mask, got others among the queries {rows.start} to {rows.stop - 1}; pass the mask that the model "
                    "used, or scores as the first argument"
                )
            yield systems, rows, columns, x.div_(torch.where(used, total, 1.0)[..., None])

    return blocks


def refuse_unusable(
    scores: Tensor, arranged: Tensor, cells: Cells, layout: Layout, *, pool: bool, suspicious: bool
) -> None:
    """Raise if scores are an attention pattern, or not finite, or hold masking values (looked for if suspicious)."""
    refuse_patterns(scores, "pass it as pattern=")
    lowest = torch.zeros(arranged.shape[:2], dtype=torch.float64, device=scores.device)
    highest = lowest.clone()
    for systems, rows, columns, inside in _blocks(layout, *lowest.shape):
        x = arranged[systems][..., rows, columns].masked_fill(~inside, 0.0)
        lowest[systems] = lowest[systems].minimum(x.amin((-2, -1)))
        highest[systems] = highest[systems].maximum(x.amax((-2, -1)))
    refuse_non_finite(scores, cells, lowest.square().maximum(highest.square()), "scores")
    if suspicious:
        refuse_masking_values(scores, cells, to_batch(lowest, scores.shape[:-2], pool=pool).flatten(), "scores")
