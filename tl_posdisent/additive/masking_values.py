"""Refuse scores that are not finite, or hold masking values, inside the cells of a fit."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posdisent.additive.cells import Cells, cell_distances
from tl_posdisent.additive.score_checks import FAR
from tl_posdisent.utils.errors import ArgumentError

_MIN_GAP_RATIO = 100  # masked cells are this many times further from the other scores than these are from each other


def refuse_non_finite(scores: Tensor, cells: Cells, squares: Tensor, name: str) -> None:
    """Raise if a cell is NaN, infinite or the lowest number of a dtype; look only if the sum of squares is large."""
    sentinel = torch.finfo(torch.float16).min if scores.dtype == torch.float16 else -1e30
    if bool((squares < 0.99 * sentinel**2).all()):
        return
    bad = ~(scores > sentinel) | ~(scores < -sentinel)
    bad &= cells.to_mask()
    if bool(bad.any()):
        raise ArgumentError(name, f"must be finite inside the mask, {_where(scores, bad, cells)}")


def refuse_masking_values(scores: Tensor, cells: Cells, lowest: Tensor, name: str) -> None:
    """Raise if some cells were masked by a finite number such as -1e9, -65504 or -1e4, alone or added to the scores.

    Masking values are recognised by their size: they are far below 0, and either far below all other cells or one
    number that is repeated, in rows that also hold other scores.

    Args:
        lowest: ``[matrix]``, the lowest score of each matrix, which shows which matrices to check.
    """
    if bool((lowest > -FAR).all()):
        return
    n_query, n_key = scores.shape[-2:]
    inside = cells.to_mask().expand(scores.shape).reshape(-1, n_query, n_key)
    flat, bad = scores.detach().reshape(-1, n_query, n_key), torch.zeros_like(inside)
    for matrix in (lowest <= -FAR).nonzero().flatten().tolist():
        bad[matrix] = _masked(flat[matrix].double(), inside[matrix])
    bad = bad.reshape(scores.shape)
    if bool(bad.any()):
        raise ArgumentError(
            name,
            f"must not hold masking values inside the mask, {_where(scores, bad, cells)} "
            "(a boolean mask is not checked for them)",
        )


def _masked(scores: Tensor, inside: Tensor) -> Bool[Tensor, "query key"]:
    """Find the cells of one matrix that hold a masking value."""
    none = torch.zeros_like(inside)
    lowest = scores[inside].min()
    if lowest > -FAR:
        return none
    far, near = inside & (scores < lowest / 20), inside & (scores >= lowest / 20)
    rest = scores[near]
    apart = len(rest) >= 3 and bool(rest.min() - scores[far].max() > _MIN_GAP_RATIO * (rest.max() - rest.min()))
    if apart and _share_a_row(far, near):
        return far
    same = inside & (scores <= lowest + 1e-6 * lowest.abs())
    often = same.sum() >= max(3, 0.05 * float(inside.sum()))
    return same if bool(often) and _share_a_row(same, inside & (scores > lowest / 2)) else none


def _share_a_row(a: Tensor, b: Tensor) -> bool:
    """Say whether some row holds both: a row that is low as a whole shows a query component, not masking."""
    return bool((a.any(-1) & b.any(-1)).any())


def _where(scores: Tensor, bad: Tensor, cells: Cells) -> str:
    """Describe the first bad cell, and name the argument that excludes exactly the bad cells of its matrix, if any."""
    first = tuple(bad.nonzero()[0].tolist())
    inside = cells.to_mask().expand(bad.shape)[first[:-2]]
    kept, distance = inside & ~bad[first[:-2]], cell_distances(cells.n_query, cells.n_key, bad.device)
    advice = "pass the mask that the model used"
    if bool(kept.any()):
        window = int(distance[kept].abs().max()) + 1
        near = inside & (distance.abs() < window)
        for words, left in (
            (f'mask="causal", window={window}', near & (distance >= 0)),
            (f"window={window}", near),
            ('mask="causal"', inside & (distance >= 0)),
        ):
            advice = f"pass {words}" if torch.equal(kept, left) else advice
    return (
        f"got {scores[first].item():g} at index {first} (query {first[-2]}, key {first[-1]}) "
        f"and {int(bad.sum()) - 1} more such cells; {advice}"
    )
