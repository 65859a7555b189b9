"""Cells and coefficients of additive attention.

Coefficients and marginals are *stacked* in one vector: first the distances, then the keys of each band of distances.
A *system* is what is fitted by itself: the scores of a head in one text, or in all texts if these are pooled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, Grid, cell_distances

Stacked = Float64[Tensor, "system text coefficient"]
_ROWS = 64  # queries whose cells are counted together


@dataclass(frozen=True, eq=False)
class Layout(Grid):
    """Which cells there are, and which coefficients each of them has.

    Attributes:
        edges: distances at which a new band begins, ascending; keys have coefficients of their own in each band.
        queries, keys: those that have cells.
        counts: number of cells of each coefficient, stacked.
        mask: None if the cells are all those of these queries and keys with ``low <= distance <= high``.
    """

    edges: tuple[int, ...]
    queries: Bool[Tensor, "some_systems some_texts query"]
    keys: Bool[Tensor, "some_systems some_texts key"]
    counts: Float64[Tensor, "some_systems some_texts coefficient"]
    mask: Bool[Tensor, "some_systems some_texts query key"] | None

    @classmethod
    def of(cls, cells: Cells, edges: Sequence[int], batch: Sequence[int], *, pool: bool, named: bool) -> Layout:
        """The layout of cells; ``named`` says that they are those of a named mask, which is always a band."""

        def arranged(x: Tensor, n: int) -> Tensor:
            return by_system(x.expand(*batch, *x.shape[-n:]), n, pool=pool) if x.ndim > n else x[None, None]

        _, by_query, by_key = cells.split(cells.counts > 0)
        mask = None
        if not named:
            mask = cells.to_mask()
            d = cell_distances(cells.n_query, cells.n_key, mask.device)
            band = (d >= cells.low) & (d <= cells.high) & by_query[..., :, None] & by_key[..., None, :]
            mask = None if torch.equal(mask, band) else arranged(mask, 2)
        of_distance, _, of_key = (arranged(x, 1) for x in cells.split(cells.counts))
        counts = torch.cat([of_distance, *([of_key] * (len(edges) + 1))], -1)
        shape = (cells.n_query, cells.n_key, cells.low, cells.high, tuple(edges))
        layout = cls(*shape, arranged(by_query, 1), arranged(by_key, 1), counts, mask)
        if not edges:
            return layout
        counts = torch.zeros_like(counts)  # with keys counted in each band
        for row in range(0, layout.n_query, _ROWS):
            rows = slice(row, min(row + _ROWS, layout.n_query))
            columns = layout.columns(rows)
            layout.add_sums(counts, layout.inside(rows, columns).double(), rows, columns)
        return replace(layout, counts=counts)

    @property
    def n_band(self) -> int:
        return len(self.edges) + 1

    @property
    def is_causal(self) -> bool:
        """Whether each query sees all keys up to its own, without bands."""
        whole = self.mask is None and self.n_band == 1 and self.offset >= 0
        return whole and self.low == 0 and self.high == self.n_key - 1

    @property
    def band(self) -> Int64[Tensor, "distance"]:
        """The band of each distance."""
        distances = torch.arange(self.low, self.high + 1, device=self.queries.device)
        return torch.bucketize(distances, torch.tensor(self.edges, device=distances.device), right=True)

    def split(self, stacked: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the distances ``[..., distance]`` and of the keys ``[..., band, key]``."""
        return stacked[..., : self.n_distance], stacked[..., self.n_distance :].unflatten(-1, (self.n_band, self.n_key))

    def without_bands(self) -> Layout:
        """The layout with one importance for each key."""
        return replace(self, edges=(), counts=self.drop_bands(self.counts))

    def drop_bands(self, sums: Tensor) -> Tensor:
        """Stacked sums with those of keys added up over the bands."""
        by_distance, by_key = self.split(sums)
        return torch.cat([by_distance, by_key.sum(-2)], -1)

    def select(self, systems: slice | Int64[Tensor, "chosen"]) -> Layout:

        def some(x: Tensor) -> Tensor:
            return x if len(x) == 1 else x[systems]

        mask = None if self.mask is None else some(self.mask)
        queries, keys, counts = (some(x) for x in (self.queries, self.keys, self.counts))
        return replace(self, queries=queries, keys=keys, counts=counts, mask=mask)

    def _distances(self, rows: slice, columns: slice) -> Int64[Tensor, "row column"]:
        device = self.queries.device
        query = torch.arange(rows.start, rows.stop, device=device) + self.offset
        return query[:, None] - torch.arange(columns.start, columns.stop, device=device)

    def inside(self, rows: slice, columns: slice) -> Bool[Tensor, "some_systems some_texts row column"]:
        """True where a cell of this block counts."""
        if self.mask is not None:
            return self.mask[..., rows, columns]
        d = self._distances(rows, columns)
        band = (d >= self.low) & (d <= self.high)
        return band & self.queries[..., rows, None] & self.keys[..., None, columns]

    def spread(self, stacked: Stacked, rows: slice, columns: slice) -> Float64[Tensor, "system text row column"]:
        """The sum of its two coefficients at each cell of a block."""
        by_distance, by_key = self.split(stacked)
        n_row, n_column = rows.stop - rows.start, columns.stop - columns.start
        shift = rows.stop - 1 + self.offset - columns.start  # distance of the last row's first cell
        d = torch.arange(shift, shift - n_row - n_column + 1, -1, device=stacked.device).clamp(self.low, self.high)
        if not n_column:
            return stacked.new_zeros(*stacked.shape[:-1], n_row, 0)
        # Row after row, a window of the distances that begins one earlier.
        out = by_distance[..., d - self.low].unfold(-1, n_column, 1).flip(-2)
        if self.n_band == 1:
            return out.add_(by_key[..., 0, None, columns])
        for b, some, member in self._bands_of(rows, columns):
            of_keys = by_key[..., b, None, columns.start + some.start : columns.start + some.stop]
            out[..., some] += of_keys * member
        return out

    def _bands_of(self, rows: slice, columns: slice) -> Iterator[tuple[int, slice, Float64[Tensor, "row part"]]]:
        """The bands in a block: each with the block's columns that have some of its cells, and 1 where they are."""
        bounds = zip((self.low, *self.edges), (*(edge - 1 for edge in self.edges), self.high), strict=True)
        for b, (first, last) in enumerate(bounds):
            left = max(rows.start + self.offset - last, columns.start)
            right = min(rows.stop + self.offset - first, columns.stop)
            if left >= right:
                continue
            d = self._distances(rows, slice(left, right))
            member = torch.bucketize(d, d.new_tensor(self.edges), right=True) == b
            yield b, slice(left - columns.start, right - columns.start), member.double()

    def add_sums(
        self, sums: Stacked, block: Float64[Tensor, "system text row column"], rows: slice, columns: slice
    ) -> None:
        """Add a block's sums along distances and keys to ``sums``; the block must be 0 where no cell counts."""
        by_distance, by_key = self.split(sums)
        self.add_diagonals(by_distance, block, rows, columns)
        if self.n_band == 1:
            by_key[..., 0, columns] += block.sum(-2)
            return
        for b, some, member in self._bands_of(rows, columns):
            part = slice(columns.start + some.start, columns.start + some.stop)
            by_key[..., b, part] += (block[..., some] * member).sum(-2)


def by_system(x: Tensor, n: int, *, pool: bool) -> Tensor:
    """Leading axes as ``(system, text)``, before the last ``n``: pooled texts, the first axis, share a system."""
    last = x.shape[x.ndim - n :]
    if not pool:
        return x.reshape(x.shape[: x.ndim - n].numel(), 1, *last)  # also of features of which there are none
    return x.movedim(0, x.ndim - n - 1).reshape(x.shape[1 : x.ndim - n].numel(), x.shape[0], *last)


def to_batch(x: Tensor, batch: Sequence[int], *, pool: bool) -> Tensor:
    """The transpose of ``by_system``: leading axes of the scores, from ``(system, text)``."""
    return (x.movedim(1, 0) if pool else x[:, 0]).reshape((*batch, *x.shape[2:]))


def first_keys(seen: Bool[Tensor, "*mask key"], n: int) -> Float64[Tensor, "*mask key n"]:
    """Features that mark the first n keys that some query sees, one feature for each."""
    order = torch.arange(1, n + 1, device=seen.device)
    return (seen[..., None] & (seen.cumsum(-1)[..., None] == order)).double()
