"""The matrices of a fit of attention, arranged by system and text, with the cells of each.

A *system* is one independent fit: the scores of a head in one text, or in all texts if these are pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.cells import Cells


@dataclass(frozen=True, eq=False)
class Systems:
    """Sets of cells by system and text.

    Attributes:
        cells: the sets of cells.
        sets: which of these each matrix has, as a flat index of their leading axes; None if all have the same.
    """

    cells: Cells
    sets: Int64[Tensor, "system text"] | None

    @classmethod
    def of(cls, cells: Cells, batch: Sequence[int], *, pool: bool) -> Systems:
        """Arrange the cells of matrices with these leading axes."""
        leading = cells.counts.shape[:-1]
        if not leading:
            return cls(cells, None)
        index = torch.arange(leading.numel(), device=cells.counts.device).reshape(leading)
        return cls(cells, by_system(index.expand(*batch), 0, pool=pool))

    @cached_property
    def counts(self) -> Float64[Tensor, "#system #text coefficient"]:
        """Number of cells of each distance, query and key, stacked."""
        counts = self.cells.counts
        return counts[None, None] if self.sets is None else counts.flatten(0, -2)[self.sets]

    @property
    def queries(self) -> Bool[Tensor, "#system #text query"]:
        """True for queries that have cells."""
        return self.cells.split(self.counts).query > 0

    @property
    def keys(self) -> Bool[Tensor, "#system #text key"]:
        """True for keys that have cells."""
        return self.cells.split(self.counts).key > 0

    def select(self, systems: slice | Int64[Tensor, " chosen"]) -> Systems:
        """Return those of some of the systems."""
        return self if self.sets is None else replace(self, sets=self.sets[systems])

    def inside(self, rows: slice, columns: slice) -> Bool[Tensor, "#system #text row column"]:
        """Return a mask of the block's cells that belong to the fit."""
        if self.sets is None:
            return self.cells.inside(rows, columns)[None, None]
        inside: Tensor = self.cells.inside(rows, columns, self.sets.flatten()).unflatten(0, self.sets.shape)
        return inside


def by_system(x: Tensor, n: int, *, pool: bool) -> Tensor:
    """Reshape the axes before the last ``n`` to ``(system, text)``: pooled texts, the first axis, share a system."""
    last = x.shape[x.ndim - n :]
    if not pool:
        return x.reshape(x.shape[: x.ndim - n].numel(), 1, *last)  # -1 would fail for an empty axis of features
    return x.movedim(0, x.ndim - n - 1).reshape(x.shape[1 : x.ndim - n].numel(), x.shape[0], *last)


def to_batch(x: Tensor, batch: Sequence[int], *, pool: bool) -> Tensor:
    """Undo ``by_system``: reshape ``(system, text)`` to the leading axes of the scores."""
    return (x.movedim(1, 0) if pool else x[:, 0]).reshape((*batch, *x.shape[2:]))
