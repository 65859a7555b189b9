"""The marginals of a score matrix whose rows come a block at a time, as from a model with a key–value cache."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from .cells import Cells
from .marginals import Marginals, read_marginals


def no_marginals(batch: torch.Size, cells: Cells) -> Marginals:
    """Those of nothing yet."""
    device = cells.counts.device
    zero = torch.zeros(batch, dtype=torch.float64, device=device)
    return Marginals(zero, zero.new_zeros(*batch, cells.counts.shape[-1]), zero.clone())


def add_rows(
    total: Marginals, scores: Float[Tensor, "*batch row seen"], rows: Cells, cells: Cells, *, first: int
) -> Marginals:
    """``total`` and the scores of the queries ``first …``, of which the last stands at the last key seen.

    Args:
        total: of all queries before, about 0 or about a pivot; its sums are added to.
        rows: the cells of these scores; one set for all matrices.
        cells: those of the whole matrix.
        first: number of queries before.
    """
    read = read_marginals(scores, rows)
    n_row, n_seen = scores.shape[-2:]
    pivot = read.pivot if first == 0 else total.pivot  # near the mean of the first rows, so that squares do not cancel
    shift = read.pivot - pivot
    added = rows.split(torch.addcmul(read.sums, rows.counts, shift[..., None]))
    of_all = cells.split(total.sums)
    low = rows.low - cells.low
    of_all.distance[..., low : low + rows.n_distance] += added.distance
    of_all.query[..., first : first + n_row] += added.query
    of_all.key[..., :n_seen] += added.key
    square = read.squares + shift * (2 * rows.split(read.sums).query.sum(-1) + rows.n_cells * shift)
    return Marginals(pivot, total.sums, total.squares + square)
