"""Cells and coefficients of additive attention, its normalisers and marginals, and products with its Hessian.

Coefficients and marginals are *stacked* in one vector: first the distances, then the keys of each band of distances.
A *system* is one independent fit: the scores of a head in one text, or in all texts if these are pooled. If the cells
are all those between two distances, sums are computed by Fourier transforms, in O(length · log length). Tiles of
queries for which rounding would matter, and other masks, are computed cell by cell in the log domain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor
from torch.nn.functional import pad

from tl_posdisent.additive.cells import Cells, Grid, cell_distances

Stacked = Float64[Tensor, "system text coefficient"]
_ROWS = 64  # number of queries whose cells are counted together


@dataclass(frozen=True, eq=False)
class Layout(Grid):
    """The cells of a fit, and the coefficients of each cell.

    Attributes:
        edges: distances at which a new band begins, ascending; each key has one coefficient per band.
        queries, keys: True for those that have cells.
        counts: number of cells of each coefficient, stacked.
        mask: the cells, or None if these are all cells of these queries and keys with ``low <= distance <= high``.
    """

    edges: tuple[int, ...]
    queries: Bool[Tensor, "some_systems some_texts query"]
    keys: Bool[Tensor, "some_systems some_texts key"]
    counts: Float64[Tensor, "some_systems some_texts coefficient"]
    mask: Bool[Tensor, "some_systems some_texts query key"] | None

    @classmethod
    def of(cls, cells: Cells, edges: Sequence[int], batch: Sequence[int], *, pool: bool, named: bool) -> Layout:
        """Create the layout of ``cells``; ``named`` if they come from a named mask, which is always a band."""

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
        counts = torch.zeros_like(counts)  # now with keys counted per band
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
    def band(self) -> Int64[Tensor, " distance"]:
        """The band of each distance."""
        distances = torch.arange(self.low, self.high + 1, device=self.queries.device)
        return torch.bucketize(distances, torch.tensor(self.edges, device=distances.device), right=True)

    def split(self, stacked: Tensor) -> tuple[Tensor, Tensor]:
        """Split a stacked vector into views of the distances ``[..., distance]`` and keys ``[..., band, key]``."""
        return stacked[..., : self.n_distance], stacked[..., self.n_distance :].unflatten(-1, (self.n_band, self.n_key))

    def drop_bands(self, sums: Tensor) -> Tensor:
        """Add up the keys' sums over the bands."""
        by_distance, by_key = self.split(sums)
        return torch.cat([by_distance, by_key.sum(-2)], -1)

    def select(self, systems: slice | Int64[Tensor, " chosen"]) -> Layout:
        """Return the layout of some of the systems."""

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
        """Return a mask of the block's cells that belong to the fit."""
        if self.mask is not None:
            return self.mask[..., rows, columns]
        d = self._distances(rows, columns)
        band = (d >= self.low) & (d <= self.high)
        return band & self.queries[..., rows, None] & self.keys[..., None, columns]

    def spread(self, stacked: Stacked, rows: slice, columns: slice) -> Float64[Tensor, "system text row column"]:
        """Add the coefficients of distance and key at each cell of a block."""
        by_distance, by_key = self.split(stacked)
        n_row, n_column = rows.stop - rows.start, columns.stop - columns.start
        shift = rows.stop - 1 + self.offset - columns.start  # distance of the last row's first cell
        d = torch.arange(shift, shift - n_row - n_column + 1, -1, device=stacked.device).clamp(self.low, self.high)
        if not n_column:
            return stacked.new_zeros(*stacked.shape[:-1], n_row, 0)
        # Each row is a window of the distances that begins one entry before that of the row above.
        out = by_distance[..., d - self.low].unfold(-1, n_column, 1).flip(-2)
        if self.n_band == 1:
            return out.add_(by_key[..., 0, None, columns])
        for b, some, member in self._bands_of(rows, columns):
            of_keys = by_key[..., b, None, columns.start + some.start : columns.start + some.stop]
            out[..., some] += of_keys * member
        return out

    def _bands_of(self, rows: slice, columns: slice) -> Iterator[tuple[int, slice, Float64[Tensor, "row part"]]]:
        """Yield each band in a block, with the columns that contain it and a 0/1 matrix of its cells there."""
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
        """Add a block's sums along distances and keys to ``sums``; the block must be 0 outside the cells."""
        by_distance, by_key = self.split(sums)
        self.add_diagonals(by_distance, block, rows, columns)
        if self.n_band == 1:
            by_key[..., 0, columns] += block.sum(-2)
            return
        for b, some, member in self._bands_of(rows, columns):
            part = slice(columns.start + some.start, columns.start + some.stop)
            by_key[..., b, part] += (block[..., some] * member).sum(-2)


def by_system(x: Tensor, n: int, *, pool: bool) -> Tensor:
    """Reshape the axes before the last ``n`` to ``(system, text)``: pooled texts, the first axis, share a system."""
    last = x.shape[x.ndim - n :]
    if not pool:
        return x.reshape(x.shape[: x.ndim - n].numel(), 1, *last)  # -1 would fail for an empty axis of features
    return x.movedim(0, x.ndim - n - 1).reshape(x.shape[1 : x.ndim - n].numel(), x.shape[0], *last)


def to_batch(x: Tensor, batch: Sequence[int], *, pool: bool) -> Tensor:
    """Undo ``by_system``: reshape ``(system, text)`` to the leading axes of the scores."""
    return (x.movedim(1, 0) if pool else x[:, 0]).reshape((*batch, *x.shape[2:]))


def first_keys(seen: Bool[Tensor, "*mask key"], n: int) -> Float64[Tensor, "*mask key n"]:
    """Create one indicator feature for each of the first n keys that some query sees."""
    order = torch.arange(1, n + 1, device=seen.device)
    return (seen[..., None] & (seen.cumsum(-1)[..., None] == order)).double()


# Transforms have an error of about 2e-16 times the product of the two inputs' norms, so a normaliser above _SAFE times
# that product has a relative error of at most about 1e-10.
_SAFE = 2e-6
_TINY = 1e-140  # the inverse squares of normalisers below this come close to overflow
_NEAR = 32  # number of distances next to the query that are summed cell by cell

Queries = Float64[Tensor, "system text query"]
NearCells = Float64[Tensor, "system text query near"]


class FourierSums:
    """``AttentionSums`` for the queries whose sums a Fourier transform gives precisely.

    On a grid where query ``t`` sees key ``j`` at distance ``low + t - j``, ``Z[t] = Σ_j e^{d[t - j]} e^{k[j]}`` is a
    convolution, and the marginals are correlations with ``1/Z``. No exponential exceeds 1, because the largest
    coefficient of a band's keys is moved to its distances. Rounding errors are relative to the largest normaliser.
    Therefore the distances next to the query, where profiles are steepest, are summed cell by cell, and queries whose
    normaliser is still too small are left to the caller.

    Attributes:
        unsafe: tiles that contain queries left to the caller.
        log_z, marginals: as in ``AttentionSums``, 0 for the queries of those tiles.
    """

    def __init__(self, layout: Layout, stacked: Stacked, tiles: list[slice]) -> None:
        """Evaluate at these coefficients; a tile is left out as a whole."""
        self._layout = layout
        self._length = 1 << (layout.n_key + layout.n_distance - 2).bit_length()
        self._first = layout.offset - layout.low
        by_distance, by_key = layout.split(stacked)
        band, device = layout.band, stacked.device
        level = by_key.masked_fill(~layout.keys[..., None, :], -torch.inf).amax(-1, keepdim=True)
        member = band == torch.arange(layout.n_band, device=device)[:, None]
        logits = (by_distance[..., None, :] + level).masked_fill(~member, -torch.inf)
        shift = logits.amax((-2, -1))
        distance, key = (logits - shift[..., None, None]).exp_(), (by_key - level).exp_() * layout.keys[..., None, :]

        first = max(layout.low, -(_NEAR // 2) if layout.low < 0 else 0)
        first = min(first, layout.high)
        d = torch.arange(first, min(layout.high + 1, first + _NEAR), device=device)
        self._near = slice(first - layout.low, first - layout.low + len(d))
        at = torch.arange(layout.n_query, device=device)[:, None] + layout.offset - d
        exists = (at >= 0) & (at < layout.n_key)
        # Index of a near cell's key among the keys of all bands; one past the end where there is no key.
        self._key_of_near = torch.where(exists, band[self._near] * layout.n_key + at, layout.n_band * layout.n_key)
        cells = self._of_keys(key) * distance[..., self._near].sum(-2)[..., None, :]

        distance[..., self._near] = 0.0
        far = torch.cat([band[: self._near.start], band[self._near.stop :]])
        self._bands = (far if len(far) else band).unique()  # the bands that are transformed
        self._distance, self._key = distance[..., self._bands, :], key[..., self._bands, :]
        self._distance_spectrum, self._key_spectrum = self._spectrum(self._distance), self._spectrum(self._key)
        z = self._at_queries(self._distance_spectrum * self._key_spectrum) + cells.sum(-1)
        norms = torch.linalg.vector_norm(self._distance, dim=-1) * torch.linalg.vector_norm(self._key, dim=-1)
        bad = ((z < _SAFE * norms.sum(-1, keepdim=True)) | (z < _TINY)) & layout.queries
        self.unsafe = [rows for rows in tiles if bool(bad[..., rows].any())]
        safe = layout.queries.expand(z.shape).clone()
        for rows in self.unsafe:
            safe[..., rows] = False
        self.log_z = torch.where(safe, z.log() + shift[..., None], 0.0)
        self._inverse = torch.where(safe, 1 / z, 0.0)
        self._cells = cells.mul_(self._inverse[..., None])
        self._spectrum_of_inverse = self._spectrum_of_queries(self._inverse)
        to_distance = self._spectrum_of_inverse * self._key_spectrum.conj()
        to_key = self._spectrum_of_inverse * self._distance_spectrum.conj()
        self._far = self._stacked(to_distance, to_key, self._distance, self._key)
        self.marginals = self._add_near(self._cells, self._far.clone())

    def _spectrum(self, x: Tensor) -> Tensor:
        spectrum: Tensor = torch.fft.rfft(x, self._length)
        return spectrum

    def _inverse_transform(self, spectrum: Tensor, n: int) -> Tensor:
        x: Tensor = torch.fft.irfft(spectrum, self._length)
        return x[..., :n]

    def _spectrum_of_queries(self, x: Queries) -> Tensor:
        return self._spectrum(pad(x, (self._first, 0)))[..., None, :]

    def _at_queries(self, spectrum: Tensor) -> Queries:
        x = self._inverse_transform(spectrum.sum(-2), self._first + self._layout.n_query)[..., max(self._first, 0) :]
        return pad(x, (max(-self._first, 0), 0))  # queries before the grid have no cells

    def _stacked(self, to_distance: Tensor, to_key: Tensor, distance: Tensor, key: Tensor) -> Stacked:
        """Transform spectra back to stacked sums, weighted with these exponentials."""
        of_distance = (distance * self._inverse_transform(to_distance, self._layout.n_distance)).sum(-2)
        of_key = key * self._inverse_transform(to_key, self._layout.n_key)
        of_bands = of_key.new_zeros(*of_key.shape[:-2], self._layout.n_band, self._layout.n_key)
        return torch.cat([of_distance, of_bands.index_copy(-2, self._bands, of_key).flatten(-2)], -1)

    def _of_keys(self, by_key: Float64[Tensor, "system text band key"]) -> NearCells:
        """Look up the coefficient of each near cell's key in the cell's band; 0 where there is no key."""
        return pad(by_key.flatten(-2), (0, 1))[..., self._key_of_near]

    def _add_near(self, cells: NearCells, sums: Stacked) -> Stacked:
        """Add the sums of near cells along distances and keys to ``sums``; cells without a key must be 0."""
        sums[..., self._near] += cells.sum(-2)
        by_key = sums.new_zeros(*sums.shape[:-1], self._layout.n_band * self._layout.n_key + 1)
        by_key.scatter_add_(-1, self._key_of_near.flatten().expand(*sums.shape[:-1], -1), cells.flatten(-2))
        sums[..., self._layout.n_distance :] += by_key[..., :-1]
        return sums

    def diagonal(self) -> Stacked:
        """Compute these queries' part of ``AttentionSums.diagonal``."""
        squares = self._spectrum_of_queries(self._inverse.square())
        distance, key = self._distance.square(), self._key.square()
        to_distance, to_key = squares * self._spectrum(key).conj(), squares * self._spectrum(distance).conj()
        removed = self._stacked(to_distance, to_key, distance, key)
        return self.marginals - self._add_near(self._cells.square(), removed)

    def product(self, x: Stacked) -> Stacked:
        """Compute these queries' part of ``AttentionSums.product``."""
        by_distance, by_key = self._layout.split(x)
        distance = self._spectrum(self._distance * by_distance[..., None, :])
        key = self._spectrum(self._key * by_key[..., self._bands, :])
        near = self._of_keys(by_key).add_(by_distance[..., None, self._near])
        mean = self._at_queries(distance * self._key_spectrum + self._distance_spectrum * key) * self._inverse
        mean += torch.einsum("stqn,stqn->stq", near, self._cells)
        removed = self._spectrum_of_queries(mean * self._inverse)
        to_distance = self._spectrum_of_inverse * key.conj() - removed * self._key_spectrum.conj()
        to_key = self._spectrum_of_inverse * distance.conj() - removed * self._distance_spectrum.conj()
        out = self._stacked(to_distance, to_key, self._distance, self._key).addcmul_(self._far, x)
        return self._add_near(near.sub_(mean[..., None]).mul_(self._cells), out)


_TILE = 64  # number of queries that are computed cell by cell together
_STORED = 2**26  # most cells of a pattern that are kept between products; beyond that, they are recomputed


class AttentionSums:
    """Additive attention with given coefficients: all that a step of Newton's method needs.

    Attributes:
        log_z: logarithm of the normaliser of each query; 0 for a query without cells.
        marginals: total attention of each distance, and of each key in each band, stacked.
        diagonal: diagonal of the Hessian of ``Σ log Z``, sums of ``p (1 - p)``; where transforms are used, the error is
            about 1e-5 of the marginals.
        tiles: queries that are computed cell by cell.
    """

    log_z: Float64[Tensor, "system text query"]
    marginals: Stacked
    tiles: list[slice]

    def __init__(self, layout: Layout, stacked: Stacked, *, direct: bool = False) -> None:
        """Evaluate at these coefficients; with ``direct``, compute every cell without transforms."""
        self._layout, self._stacked = layout, stacked
        self.tiles = [slice(t, min(t + _TILE, layout.n_query)) for t in range(0, layout.n_query, _TILE)]
        self._fourier: FourierSums | None = None
        if layout.mask is None and not direct:
            self._fourier = FourierSums(layout, stacked, self.tiles)
            self.tiles = self._fourier.unsafe
            self.log_z, self.marginals = self._fourier.log_z.clone(), self._fourier.marginals.clone()
        else:
            self.log_z = stacked.new_zeros(*stacked.shape[:-1], layout.n_query)
            self.marginals = torch.zeros_like(stacked)
        n_cells = sum((r.stop - r.start) * (c.stop - c.start) for r, c in ((r, layout.columns(r)) for r in self.tiles))
        self._stored: list[Tensor] | None = [] if n_cells * stacked[..., 0].numel() <= _STORED else None
        for rows in self.tiles:
            logits = self._logits(rows)
            z = logits.logsumexp(-1)
            self.log_z[..., rows] = torch.where(z > -torch.inf, z, 0.0)
            pattern = logits.sub_(self.log_z[..., rows, None]).exp_()
            if self._stored is not None:
                self._stored.append(pattern)
            layout.add_sums(self.marginals, pattern, rows, layout.columns(rows))
        self.marginals *= layout.counts > 0  # where there are no cells, transforms leave rounding errors

    @cached_property
    def diagonal(self) -> Stacked:
        """Sums of ``p (1 - p)``, computed when a step needs them: most evaluations do not."""
        out = torch.zeros_like(self._stacked) if self._fourier is None else self._fourier.diagonal()
        for n, rows in enumerate(self.tiles):
            pattern = self._pattern(n)
            self._layout.add_sums(out, pattern * (1 - pattern), rows, self._layout.columns(rows))
        return out.mul_(self._layout.counts > 0)

    def product(self, x: Stacked) -> Stacked:
        """Multiply the Hessian of ``Σ log Z`` by ``x``: marginals of the pattern times ``x - mean per query``.

        Systems of ``x`` broadcast against those of the coefficients.
        """
        out = torch.zeros_like(x) if self._fourier is None else self._fourier.product(x)
        for n, rows in enumerate(self.tiles):
            columns, pattern = self._layout.columns(rows), self._pattern(n)
            weighted = self._layout.spread(x, rows, columns).mul_(pattern)
            mean = weighted.sum(-1, keepdim=True)
            self._layout.add_sums(out, weighted.addcmul_(pattern, mean, value=-1), rows, columns)
        return out.mul_(self._layout.counts > 0)

    def _pattern(self, tile: int) -> Float64[Tensor, "system text row column"]:
        """Return a tile's part of the pattern, which must not be written to."""
        if self._stored is not None:
            return self._stored[tile]
        rows = self.tiles[tile]
        return self._logits(rows).sub_(self.log_z[..., rows, None]).exp_()

    def _logits(self, rows: slice) -> Float64[Tensor, "system text row column"]:
        columns = self._layout.columns(rows)
        cells = self._layout.spread(self._stacked, rows, columns)
        return cells.masked_fill_(~self._layout.inside(rows, columns), -torch.inf)
