"""One pass over a score tensor: its sums along distances, queries and keys, and its sum of squares.

This is all of the scores that the additive fit needs. Blocks of a few megabytes are converted to float64 and
summed while they are in cache; cells outside the mask are never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from .cells import Band, Cells, diagonal_sums
from .solver import Parts

_HUGE = 1e30  # models mask with -inf or with a huge negative number; no real score comes near


@dataclass(frozen=True)
class Marginals:
    """Sums of ``scores - pivot`` over the cells; the pivot is near the mean, so that squares do not cancel."""

    pivot: Float64[Tensor, "*batch"]
    sums: Parts
    squares: Float64[Tensor, "*batch"]


def read_marginals(scores: Float[Tensor, "*batch query key"], cells: Cells) -> Marginals:
    """Marginal sums of every score matrix over ``cells``, in float64.

    Raises:
        ValueError: a cell inside the mask is NaN, infinite or a masking value; says where the first one is.
    """
    batch, (n_query, n_key) = scores.shape[:-2], scores.shape[-2:]
    flat, masks = scores.reshape(-1, n_query, n_key), _flat_masks(cells, batch, scores.device)
    n, n_distance = flat.shape[0], cells.high - cells.low + 1
    sums = Parts(*(flat.new_zeros(n, size, dtype=torch.float64) for size in (n_distance, n_query, n_key)))
    pivot, squares = (flat.new_zeros(n, dtype=torch.float64) for _ in range(2))

    cells_per_block = 2**18 if flat.device.type == "cpu" else 2**24
    rows = min(n_query, max(1, cells_per_block // n_key))
    heads = max(1, cells_per_block // (rows * n_key))
    for first in range(0, n, heads):
        some = slice(first, first + heads)
        pivot[some] = _typical(flat[some], cells, masks, some)
        for row in range(0, n_query, rows):
            stop = min(row + rows, n_query)
            left, right = _columns(cells, row, stop)
            if left >= right:
                continue
            inside = _inside(cells, masks, some, slice(row, stop), slice(left, right), flat.device)
            block = flat[some, row:stop, left:right].double() - pivot[some, None, None]
            block = torch.where(inside, block, 0.0)
            shift = row + (n_key - n_query) - left  # distance of the block's first cell
            low, high = max(cells.low, shift - (right - left - 1)), min(cells.high, shift + stop - row - 1)
            diagonals = slice(low - cells.low, high - cells.low + 1)
            sums.distance[some, diagonals] += diagonal_sums(block, low - shift, high - shift)
            sums.query[some, row:stop] += block.sum(-1)
            sums.key[some, left:right] += block.sum(-2)
            squares[some] += block.flatten(1).square().sum(-1)
    _refuse_unusable(scores, cells, squares)
    shaped = Parts(*(x.reshape(*batch, x.shape[-1]) for x in sums))
    return Marginals(pivot.reshape(batch), shaped, squares.reshape(batch))


def _flat_masks(cells: Cells, batch: torch.Size, device: torch.device) -> Tensor | None:
    """One mask for each score matrix, or one for all, or None for a band, whose mask is never stored."""
    if isinstance(cells, Band):
        return None
    mask = cells.to_mask(device)
    if mask.ndim == 2:
        return mask[None]
    return mask.expand(*batch, *mask.shape[-2:]).flatten(0, -3)


def _inside(
    cells: Cells, masks: Tensor | None, some: slice, rows: slice, columns: slice, device: torch.device
) -> Bool[Tensor, "head row column"]:
    if masks is not None:
        return masks[some if len(masks) > 1 else slice(None), rows, columns]
    i = torch.arange(rows.start, rows.stop, device=device) + (cells.n_key - cells.n_query)
    distance = i[:, None] - torch.arange(columns.start, columns.stop, device=device)
    return ((distance >= cells.low) & (distance <= cells.high))[None]


def _columns(cells: Cells, row: int, stop: int) -> tuple[int, int]:
    """The keys that a block of queries can see."""
    offset = cells.n_key - cells.n_query
    return max(0, row + offset - cells.high), min(cells.n_key, stop - 1 + offset - cells.low + 1)


def _typical(x: Tensor, cells: Cells, masks: Tensor | None, some: slice) -> Float64[Tensor, "head"]:
    """About the mean of each matrix: over the last query's cells, or over all where the mask is irregular."""
    first = cells.n_query - 1 if isinstance(cells, Band) else 0
    rows, columns = slice(first, cells.n_query), slice(0, cells.n_key)
    inside = _inside(cells, masks, some, rows, columns, x.device)
    total = torch.where(inside, x[:, first:].double(), 0.0).sum((-2, -1))
    mean = total / inside.sum((-2, -1)).clamp_min(1)
    return torch.where(mean.abs() < _HUGE, mean, 0.0)  # NaN and masking values are reported later


def _refuse_unusable(scores: Tensor, cells: Cells, squares: Tensor) -> None:
    """Look for cells that are no scores, but only when the sum of squares says that there may be some."""
    sentinel = torch.finfo(torch.float16).min if scores.dtype == torch.float16 else -_HUGE
    if bool((squares < sentinel**2).all()):
        return
    bad = ~(scores > sentinel) | ~(scores < -sentinel)
    bad &= cells.to_mask(scores.device)
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"scores must be finite inside the mask, got {scores[where].item():g} at index {where} "
            f"(query {where[-2]}, key {where[-1]}) and {int(bad.sum()) - 1} more such cells; "
            "pass the mask that the model used"
        )
