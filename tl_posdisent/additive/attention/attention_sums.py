"""Normalisers and marginals of additive attention ``softmax_j(d[i - j] + k[j])``, and products with its Hessian.

The normalisers ``Z_i = Σ_j e^{d[i - j]} e^{k[j]}`` are a convolution, and the marginals of the pattern are correlations
with ``1/Z``: O(length · log length) by Fourier transforms, without a pattern. Their rounding errors are relative to the
largest normaliser, so tiles of queries that have a small one are formed cell by cell, in the log domain, and the
transforms see the other queries only. Before that, the distances next to the query, where profiles are steepest, are
left to ``attention_near``. Masks that are not a band of distances are formed cell by cell throughout.

Coefficients and marginals are *stacked* in one vector: first the distances, then the keys of each band of distances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.attention.attention_near import NEAR, NearCells
from tl_posdisent.additive.cells import Cells, cell_distances, diagonal_sums

# Transforms err by about 2e-16 of the product of the norms of what is convolved, so a normaliser above this part of
# that product is good to about 1e-10.
_SAFE = 2e-6
_TINY = 1e-140  # normalisers whose inverse squares overflow soon
_TILE = 64  # queries that are formed cell by cell together
_STORED = 2**26  # cells of a pattern that are kept from one product to the next; beyond, they are formed anew
_BLOCK = 2**21  # cells that are formed at a time

Stacked = Float64[Tensor, "system text coefficient"]


@dataclass(frozen=True, eq=False)
class Layout:
    """Which cells there are, and which coefficients each of them has. A system is what is fitted by itself.

    Attributes:
        n_query, n_key, low, high: as in ``Cells``.
        edges: distances at which a new band begins, ascending; keys have coefficients of their own in each band.
        queries, keys: those that have cells.
        counts: number of cells of each coefficient, stacked.
        mask: None if the cells are all those of these queries and keys with ``low <= distance <= high``.
    """

    n_query: int
    n_key: int
    low: int
    high: int
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
        return replace(layout, counts=layout._count()) if edges else layout

    def _count(self) -> Stacked:
        """The counts, with keys counted in each band."""
        counts = self.counts.clone()
        by_key = self.split(counts)[1]
        if self.mask is not None:
            counts.zero_()
            self.add_sums(counts, self.mask.double(), slice(0, self.n_query), slice(0, self.n_key))
            return counts
        starts = [self.low, *(min(max(e, self.low), self.high + 1) for e in self.edges), self.high + 1]
        before = torch.nn.functional.pad(self.queries.cumsum(-1), (1, 0))
        key = torch.arange(self.n_key, device=before.device) - self.offset
        for b, (first, stop) in enumerate(pairwise(starts)):
            end, begin = ((key + x).clamp(0, self.n_query) for x in (stop, first))
            by_key[..., b, :] = (before[..., end] - before[..., begin]) * self.keys
        return counts

    @property
    def used(self) -> Bool[Tensor, "some_systems some_texts coefficient"]:
        """Coefficients that have cells."""
        return self.counts > 0

    @property
    def offset(self) -> int:
        """Position of the first query."""
        return self.n_key - self.n_query

    @property
    def n_distance(self) -> int:
        """Distances between the lowest and the highest, both included."""
        return self.high - self.low + 1

    @property
    def n_band(self) -> int:
        """Number of bands."""
        return len(self.edges) + 1

    @property
    def n_coefficient(self) -> int:
        """Length of a stacked vector."""
        return self.n_distance + self.n_band * self.n_key

    @property
    def is_causal(self) -> bool:
        """Whether each query sees all keys up to its own, without bands."""
        return self.mask is None and self.n_band == 1 and self.low == 0 and self.high == self.n_key - 1

    @property
    def band(self) -> Int64[Tensor, "distance"]:
        """The band of each distance."""
        distances = torch.arange(self.low, self.high + 1, device=self.queries.device)
        return torch.bucketize(distances, distances.new_tensor(self.edges), right=True)

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

    def select(self, systems: slice) -> Layout:
        """The layout of some systems."""

        def some(x: Tensor) -> Tensor:
            return x if len(x) == 1 else x[systems]

        mask = None if self.mask is None else some(self.mask)
        queries, keys, counts = (some(x) for x in (self.queries, self.keys, self.counts))
        return replace(self, queries=queries, keys=keys, counts=counts, mask=mask)

    def columns(self, rows: slice) -> slice:
        """Keys that some of these queries can see."""
        left = max(0, rows.start + self.offset - self.high)
        right = min(self.n_key, rows.stop + self.offset - self.low)
        return slice(min(left, right), right)

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
        shift = rows.start + self.offset - columns.start  # distance of the block's first cell
        n_row, n_column = block.shape[-2:]
        low, high = max(self.low, shift - n_column + 1), min(self.high, shift + n_row - 1)
        by_distance[..., low - self.low : high - self.low + 1] += diagonal_sums(block, low - shift, high - shift)
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


class AttentionSums:
    """Additive attention with given coefficients: all that a step of Newton's method asks of it.

    Attributes:
        log_z: logarithm of the normaliser of each query; 0 for a query without cells.
        marginals: total attention of each distance, and of each key in each band, stacked.
        diagonal: of the Hessian of ``Σ log Z``, sums of ``p (1 - p)``; by transforms to about 1e-5 of the marginals.
    """

    log_z: Float64[Tensor, "system text query"]
    marginals: Stacked
    diagonal: Stacked

    def __init__(self, layout: Layout, stacked: Stacked, *, direct: bool = False, keys_alone: bool = False) -> None:
        """Evaluate at these coefficients.

        Args:
            direct: form every cell.
            keys_alone: the distances have no coefficients, and their marginals and products are not asked for.
        """
        self._layout = layout
        self._transforms: _Transforms | _PrefixSums | None = None
        tiles = [slice(t, min(t + _TILE, layout.n_query)) for t in range(0, layout.n_query, _TILE)]
        self.log_z = stacked.new_zeros(*stacked.shape[:-1], layout.n_query)
        self.marginals, self.diagonal = torch.zeros_like(stacked), torch.zeros_like(stacked)
        if layout.mask is None and not direct:
            prefixes = keys_alone and layout.is_causal
            self._transforms = (_PrefixSums if prefixes else _Transforms)(layout, stacked, tiles)
            self.log_z, tiles = self._transforms.log_z, self._transforms.unsafe
            self.marginals, self.diagonal = self._transforms.marginals.clone(), self._transforms.diagonal()
        self._tiles = _Tiles(layout, stacked, tiles, self.log_z)
        for rows, columns, pattern in self._tiles.blocks():
            layout.add_sums(self.marginals, pattern, rows, columns)
            layout.add_sums(self.diagonal, pattern * (1 - pattern), rows, columns)
        self.marginals *= layout.used  # where there are no cells, transforms leave rounding errors
        self.diagonal *= layout.used

    @property
    def n_direct(self) -> int:
        """Number of queries that are formed cell by cell."""
        return sum(rows.stop - rows.start for rows in self._tiles.rows)

    def product(self, x: Stacked) -> Stacked:
        """Product of the Hessian of ``Σ log Z`` with ``x``: marginals of the pattern times ``x - mean per query``."""
        out = torch.zeros_like(x) if self._transforms is None else self._transforms.product(x)
        for rows, columns, pattern in self._tiles.blocks():
            weighted = self._layout.spread(x, rows, columns).mul_(pattern)
            mean = weighted.sum(-1, keepdim=True)
            self._layout.add_sums(out, weighted.addcmul_(pattern, mean, value=-1), rows, columns)
        return out.mul_(self._layout.used)


class _Tiles:
    """Queries whose attention is formed cell by cell."""

    def __init__(self, layout: Layout, stacked: Stacked, rows: list[slice], log_z: Tensor) -> None:
        """Enter the normalisers of these queries into ``log_z``; keep their pattern if it is not too large."""
        self._layout, self._stacked, self.rows, self._log_z = layout, stacked, rows, log_z
        columns = [layout.columns(r) for r in rows]
        size = sum((r.stop - r.start) * (c.stop - c.start) for r, c in zip(rows, columns, strict=True))
        keep = size * stacked[..., 0].numel() <= _STORED
        self._stored: list[Tensor] | None = [] if keep else None
        for r in rows:
            logits = self._logits(r)
            z = logits.logsumexp(-1)
            log_z[..., r] = torch.where(z > -torch.inf, z, 0.0)
            if self._stored is not None:
                self._stored.append(logits.sub_(log_z[..., r, None]).exp_())

    def _logits(self, rows: slice) -> Float64[Tensor, "system text row column"]:
        columns = self._layout.columns(rows)
        cells = self._layout.spread(self._stacked, rows, columns)
        return cells.masked_fill_(~self._layout.inside(rows, columns), -torch.inf)

    def blocks(self) -> Iterator[tuple[slice, slice, Float64[Tensor, "system text row column"]]]:
        """Queries, keys and pattern of every tile."""
        for n, r in enumerate(self.rows):
            formed = None if self._stored is None else self._stored[n]
            if formed is None:
                formed = self._logits(r).sub_(self._log_z[..., r, None]).exp_()
            yield r, self._layout.columns(r), formed


class _Transforms:
    """Queries whose attention is summed by Fourier transforms; ``unsafe`` lists the tiles that are left out.

    On a grid where query ``t`` sees key ``j`` at distance ``low + t - j``, ``Z[t] = Σ_j e^{d[t - j]} e^{k[j]}``. No
    exponential is above 1, as a constant moves from the keys of a band to its distances.
    """

    def __init__(self, layout: Layout, stacked: Stacked, tiles: list[slice]) -> None:
        self._layout = layout
        by_distance, by_key = layout.split(stacked)
        member = layout.band == torch.arange(layout.n_band, device=stacked.device)[:, None]
        level = by_key.masked_fill(~layout.keys[..., None, :], -torch.inf).amax(-1, keepdim=True)
        logits = (by_distance[..., None, :] + level).masked_fill(~member, -torch.inf)
        shift = logits.amax((-2, -1))
        distance = (logits - shift[..., None, None]).exp_()
        self._key = (by_key - level).exp_() * layout.keys[..., None, :]
        self._length = 1 << (layout.n_key + layout.n_distance - 2).bit_length()
        self._first = layout.offset - layout.low
        self._distance, self._far, self._near = distance, [*range(layout.n_band)], None
        z, bad = self._normalisers()
        if bool(bad.any()):
            self._close, self._near, self._far = self._split(distance)
            self._distance = distance[..., self._far, :].clone()
            self._distance[..., self._close] = 0
            z, bad = self._normalisers()
        self.unsafe, safe = _unsafe_tiles(bad, layout, tiles)
        self.log_z = torch.where(safe, z.log() + shift[..., None], 0.0)
        self._inverse = torch.where(safe, 1 / z, 0.0)
        if self._near is not None:
            self._near.normalise(self._inverse)
        self._inverse_spectrum = self._spectrum_of_queries(self._inverse)
        to_distance = self._inverse_spectrum * self._key_spectrum.conj()
        to_key = self._inverse_spectrum * self._distance_spectrum.conj()
        near = None if self._near is None else self._near.marginals()
        self.marginals = self._stacked(to_distance, to_key, near)

    def _normalisers(self) -> tuple[Tensor, Tensor]:
        """Normalisers of the queries, and for which of them rounding is not negligible."""
        self._far_key = self._key if len(self._far) == self._layout.n_band else self._key[..., self._far, :]
        self._distance_spectrum, self._key_spectrum = self._spectrum(self._distance), self._spectrum(self._far_key)
        z = self._at_queries(self._distance_spectrum * self._key_spectrum)
        if self._near is not None:
            z = z + self._near.normaliser
        norms = torch.linalg.vector_norm(self._distance, dim=-1) * torch.linalg.vector_norm(self._far_key, dim=-1)
        return z, ((z < _SAFE * norms.sum(-1, keepdim=True)) | (z < _TINY)) & self._layout.queries

    def _split(self, distance: Tensor) -> tuple[slice, NearCells, list[int]]:
        """The distances next to the query, which are summed cell by cell, and the bands that have others."""
        layout = self._layout
        first = max(layout.low, -(NEAR // 2) if layout.low < 0 else 0)
        first = first if first <= layout.high else layout.low
        stop = min(layout.high + 1, first + NEAR)
        close = slice(first - layout.low, stop - layout.low)
        of_close = layout.band[close]
        bands = []
        for band in of_close.unique().tolist():
            some = (of_close == band).nonzero()[:, 0]
            bands.append((band, slice(int(some[0]), int(some[-1]) + 1)))
        near = NearCells(
            distance[..., close].sum(-2), self._key, bands, shift=layout.offset - first, n_query=layout.n_query
        )
        others = torch.cat([layout.band[: close.start], layout.band[close.stop :]]).unique().tolist()
        return close, near, others or [0]

    def _stacked(self, to_distance: Tensor, to_key: Tensor, near: tuple[Tensor, Tensor] | None) -> Stacked:
        """Sums from spectra, and those of the distances next to the query."""
        return self._joined(
            self._distance * self._inverse_transform(to_distance, self._layout.n_distance),
            self._far_key * self._inverse_transform(to_key, self._layout.n_key),
            near,
        )

    def _joined(self, of_distance: Tensor, of_key: Tensor, near: tuple[Tensor, Tensor] | None) -> Stacked:
        of_distance = of_distance.sum(-2)
        if near is not None:
            near_distance, near_key = near
            of_distance[..., self._close] += near_distance
            near_key[..., self._far, :] += of_key
            of_key = near_key
        return torch.cat([of_distance, of_key.flatten(-2)], -1)

    def _spectrum(self, x: Tensor) -> Tensor:
        spectrum: Tensor = torch.fft.rfft(x, self._length)
        return spectrum

    def _inverse_transform(self, spectrum: Tensor, n: int) -> Tensor:
        x: Tensor = torch.fft.irfft(spectrum, self._length)
        return x[..., :n]

    def _spectrum_of_queries(self, x: Tensor) -> Tensor:
        return self._spectrum(torch.nn.functional.pad(x, (self._first, 0)))[..., None, :]

    def _at_queries(self, spectrum: Tensor) -> Tensor:
        x = self._inverse_transform(spectrum.sum(-2), self._first + self._layout.n_query)[..., max(self._first, 0) :]
        return torch.nn.functional.pad(x, (max(-self._first, 0), 0))  # queries before the grid have no cells

    def diagonal(self) -> Stacked:
        """These queries' part of ``AttentionSums.diagonal``."""
        squares = self._spectrum_of_queries(self._inverse.square())
        distance, key = self._distance.square(), self._far_key.square()
        to_distance, to_key = squares * self._spectrum(key).conj(), squares * self._spectrum(distance).conj()
        of_distance = distance * self._inverse_transform(to_distance, self._layout.n_distance)
        of_key = key * self._inverse_transform(to_key, self._layout.n_key)
        near = None if self._near is None else self._near.marginals(squared=True)
        return self.marginals - self._joined(of_distance, of_key, near)

    def product(self, x: Stacked) -> Stacked:
        """These queries' part of ``AttentionSums.product``."""
        by_distance, by_key = self._layout.split(x)
        distance = self._spectrum(self._distance * by_distance[..., None, :])
        key = self._spectrum(self._far_key * by_key[..., self._far, :])
        mean = self._at_queries(distance * self._key_spectrum + self._distance_spectrum * key) * self._inverse
        near = None
        if self._near is not None:
            close = by_distance[..., self._close]
            near_mean, of_distance = self._near.mean(close, by_key)
            mean += near_mean
            removed, of_key = self._near.product(close, mean)
            near = of_distance + removed, of_key
        removed = self._spectrum_of_queries(mean * self._inverse)
        to_distance = self._inverse_spectrum * key.conj() - removed * self._key_spectrum.conj()
        to_key = self._inverse_spectrum * distance.conj() - removed * self._distance_spectrum.conj()
        return self._stacked(to_distance, to_key, near).addcmul_(self.marginals, x)


def _unsafe_tiles(
    bad: Bool[Tensor, "system text query"], layout: Layout, tiles: list[slice]
) -> tuple[list[slice], Bool[Tensor, "system text query"]]:
    """Tiles with queries that are bad, and the queries with cells in the other tiles."""
    touched = bad.flatten(0, -2).any(0).nonzero()[:, 0] // _TILE
    unsafe = [tiles[t] for t in touched.unique().tolist()]
    safe = layout.queries.expand(bad.shape).clone()
    for rows in unsafe:
        safe[..., rows] = False
    return unsafe, safe


class _PrefixSums:
    """Importances of keys alone under a causal mask: sums over the keys so far. They keep small normalisers."""

    def __init__(self, layout: Layout, stacked: Stacked, tiles: list[slice]) -> None:
        self._layout = layout
        by_key = layout.split(stacked)[1][..., 0, :].masked_fill(~layout.keys, -torch.inf)
        level = by_key.amax(-1, keepdim=True)
        self._key = (by_key - level).exp_()
        z = self._at_queries(self._key)
        self.unsafe, safe = _unsafe_tiles((z < _TINY) & layout.queries, layout, tiles)
        self._inverse = torch.where(safe, 1 / z, 0.0)
        self.log_z = torch.where(safe, z.log() + level, 0.0)
        self._sums = self._at_keys(self._inverse)
        self.marginals = self._stacked(self._key * self._sums)

    def _at_queries(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)[..., self._layout.offset :]

    def _at_keys(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (self._layout.offset, 0)).flip(-1).cumsum(-1).flip(-1)

    def _stacked(self, by_key: Tensor) -> Stacked:
        return torch.nn.functional.pad(by_key, (self._layout.n_distance, 0))

    def diagonal(self) -> Stacked:
        """As of ``_Transforms``."""
        return self.marginals - self._stacked(self._key.square() * self._at_keys(self._inverse.square()))

    def product(self, x: Stacked) -> Stacked:
        """As of ``_Transforms``."""
        weighted = self._layout.split(x)[1][..., 0, :] * self._key
        mean = self._at_queries(weighted) * self._inverse
        return self._stacked(weighted * self._sums - self._key * self._at_keys(mean * self._inverse))
