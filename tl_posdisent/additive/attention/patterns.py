"""Read attention patterns in blocks, from scores or from the attention itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.attention.systems import Systems
from tl_posdisent.additive.score_checks import refuse_non_finite, refuse_patterns
from tl_posdisent.utils.errors import ArgumentError

_BLOCK_CELLS = 2**20  # number of cells that are read at a time
_MIN_BLOCK_QUERIES = 64  # fewest queries that are read together, if necessary from one system at a time
_SCORE_LIMIT = 1e30  # larger than any score

# Systems, queries, keys, and their part of the pattern. One call of a ``PatternBlocks`` passes once over the data.
Block = tuple[slice, slice, slice, Float64[Tensor, "system text row column"]]
PatternBlocks = Callable[[], Iterator[Block]]


def _blocks(systems: Systems, n_system: int, n_text: int) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Yield blocks of systems and queries, with the keys that they see and a mask of the cells that count."""
    cells = systems.cells
    width = n_text * cells.n_key
    n_rows = min(
        cells.n_query, max(1, _BLOCK_CELLS // (width * n_system), min(_MIN_BLOCK_QUERIES, 4 * _BLOCK_CELLS // width))
    )
    at_once = max(1, _BLOCK_CELLS // (width * n_rows))
    for system in range(0, n_system, at_once):
        chosen = slice(system, min(system + at_once, n_system))
        for row in range(0, cells.n_query, n_rows):
            rows = slice(row, min(row + n_rows, cells.n_query))
            columns = cells.columns(rows)
            if columns.stop > columns.start:
                yield chosen, rows, columns, systems.select(chosen).inside(rows, columns)


def pattern_of_scores(systems: Systems, scores: Tensor) -> PatternBlocks:
    """Return the softmax of scores that are arranged by system and text."""
    return lambda: (
        (chosen, rows, columns, _softmax(scores[chosen][..., rows, columns].to(torch.float64, copy=True), inside))
        for chosen, rows, columns, inside in _blocks(systems, *scores.shape[:2])
    )


def _softmax(x: Tensor, inside: Tensor) -> Tensor:
    """Compute the softmax in place; 0 outside the cells."""
    x = x.masked_fill_(~inside, -torch.inf)
    x = x.sub_(x.amax(-1, keepdim=True).clamp_min(-_SCORE_LIMIT)).exp_()
    return x.div_(x.sum(-1, keepdim=True).clamp_min(1))


def pattern_of_pattern(systems: Systems, pattern: Tensor) -> PatternBlocks:
    """Return a pattern that is arranged by system and text, with rows rescaled to sum to exactly 1.

    Reading raises ValueError if they do not sum to 1 within the precision of the dtype.
    """
    tolerance = 1e-2 if pattern.dtype in (torch.float16, torch.bfloat16) else 1e-3

    def blocks() -> Iterator[Block]:
        for chosen, rows, columns, inside in _blocks(systems, *pattern.shape[:2]):
            x = pattern[chosen][..., rows, columns].double().masked_fill(~inside, 0.0)
            total, used = x.sum(-1), inside.any(-1)
            if not bool((x >= 0).all()) or not bool((((total - 1).abs() <= tolerance) | ~used).all()):
                got, advice = "other rows", "pass the mask that the model used, or scores as the first argument"
                if bool(x.isnan().any()):
                    got, advice = "NaN", "the model's weights or activations are not finite"
                raise ArgumentError(
                    "pattern",
                    "must be attention after the softmax: not negative, with rows that add up to 1 within the mask, "
                    f"got {got} among the queries {rows.start} to {rows.stop - 1}; {advice}",
                )
            yield chosen, rows, columns, x.div_(torch.where(used, total, 1.0)[..., None])

    return blocks


def refuse_unusable(scores: Tensor, arranged: Tensor, systems: Systems) -> None:
    """Raise if scores are an attention pattern, or not finite inside the mask."""
    refuse_patterns(scores, "pass it as pattern=")
    largest = torch.zeros(arranged.shape[:2], dtype=torch.float64, device=scores.device)
    for chosen, rows, columns, inside in _blocks(systems, *largest.shape):
        x = arranged[chosen][..., rows, columns].masked_fill(~inside, 0.0)
        largest[chosen] = largest[chosen].maximum(x.abs().amax((-2, -1)))
    refuse_non_finite(scores, systems.cells, largest.square())
