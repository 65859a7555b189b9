"""Which (query, key) cells of a score matrix count, and what a least-squares fit asks of them.

The additive model gives every cell ``a[distance] + b[query] + c[key]``. All that the normal equations ever ask are
*marginals*: for each distance, query and key, the sum over its cells. ``Runs`` and ``Scattered`` are the two kinds
of cell sets that answer; ``make_cells`` in ``masks.py`` chooses.

Coefficients and marginals are *stacked* in one vector: first the distances, then the queries, then the keys.

Distances are those of real positions: the last query stands at the last key, so with fewer queries than keys
(a cached generation step) query ``i`` has position ``i + n_key - n_query``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

AnyCells = TypeVar("AnyCells", bound="Cells")


class Parts(NamedTuple):
    """The three axes of a stacked vector."""

    distance: Tensor
    query: Tensor
    key: Tensor


@dataclass(frozen=True, eq=False)
class Cells(ABC):
    """A set of cells, or one set for each score matrix; leading axes broadcast against those of the scores.

    Attributes:
        low, high: the lowest and the highest distance that occur (in any of the sets).
        counts: number of cells of each distance, query and key, stacked; float64, as they are weights.
    """

    n_query: int
    n_key: int
    low: int
    high: int
    counts: Float64[Tensor, "*mask coefficient"]

    @property
    def offset(self) -> int:
        """Position of the first query: how many keys came before it."""
        return self.n_key - self.n_query

    @property
    def n_distance(self) -> int:
        """Distances between the lowest and the highest, both included."""
        return self.high - self.low + 1

    @property
    def n_cells(self) -> Float64[Tensor, "*mask"]:
        """Number of cells."""
        return self.split(self.counts).query.sum(-1)

    @property
    def distances(self) -> Int64[Tensor, "distance"]:
        """All distances between the lowest and the highest, ascending."""
        return torch.arange(self.low, self.high + 1, device=self.counts.device)

    def split(self, stacked: Tensor) -> Parts:
        """Views of the three axes of a stacked vector."""
        return Parts(*stacked.split((self.n_distance, self.n_query, self.n_key), -1))

    @abstractmethod
    def inside(
        self, rows: slice, columns: slice, which: Int64[Tensor, "matrix"] | None = None
    ) -> Bool[Tensor, "*mask row column"]:
        """True where a cell of this block counts; ``which`` picks sets by their flat leading index."""

    @abstractmethod
    def product(self, x: Float64[Tensor, "*batch coefficient"]) -> Float64[Tensor, "*batch coefficient"]:
        """Marginals of the model with coefficients ``x``: a product with the normal matrix."""

    def to_mask(self) -> Bool[Tensor, "*mask query key"]:
        """The cells as a boolean matrix."""
        return self.inside(slice(0, self.n_query), slice(0, self.n_key))

    def to(self: AnyCells, device: torch.device | str) -> AnyCells:
        """The same cells on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **moved)


def cell_distances(n_query: int, n_key: int, device: torch.device | str | None = None) -> Int64[Tensor, "query key"]:
    """Distance of every cell: query position minus key position."""
    i = torch.arange(n_query, device=device) + (n_key - n_query)
    return i[:, None] - torch.arange(n_key, device=device)


def by_distance(mask: Bool[Tensor, "*mask query key"], low: int, high: int) -> Bool[Tensor, "*mask query distance"]:
    """A mask seen by query and distance: ``out[i, d - low]`` is the cell of query ``i`` at distance ``d``."""
    n_query, n_key = mask.shape[-2:]
    distance = torch.arange(low, high + 1, device=mask.device)
    key = torch.arange(n_query, device=mask.device)[:, None] + (n_key - n_query) - distance
    exists = (key >= 0) & (key < n_key)
    index = key.clamp(0, n_key - 1).expand(*mask.shape[:-2], *key.shape)
    return mask.gather(-1, index) & exists


def diagonal_sums(x: Float64[Tensor, "*batch row column"], low: int, high: int) -> Float64[Tensor, "*batch diagonal"]:
    """Sum of ``x`` along each diagonal ``row - column = low … high``; ``x`` must be 0 on all others.

    A matrix of width n read with width n + 1 shows every diagonal as a column: the sums need no index, and no
    copy either unless there are more diagonals than columns.
    """
    columns = x.shape[-1]
    width = max(columns, high - low)  # so that no two of the diagonals asked for share a column
    if width > columns:
        x = torch.nn.functional.pad(x, (0, width - columns))
    flat = x.flatten(-2)
    rows = flat.shape[-1] // (width + 1)
    whole = rows * (width + 1)
    sums = flat[..., :whole].reshape(*x.shape[:-2], rows, width + 1).sum(-2)
    tail = flat[..., whole:]
    sums[..., : tail.shape[-1]] += tail
    return sums[..., -torch.arange(low, high + 1, device=x.device) % (width + 1)]
