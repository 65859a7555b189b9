"""Sums of additive attention by Fourier transforms, where the cells are a band of distances.

The normalisers ``Z_i = Σ_j e^{d[i - j]} e^{k[j]}`` are a convolution, and the marginals of the pattern are correlations
with ``1/Z``. Rounding errors are relative to the largest normaliser. Where that matters, the distances next to the
query, where profiles are steepest, are summed cell by cell, and queries whose normaliser is still too small are left
to the caller.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.functional import pad

from tl_posdisent.additive.attention.layout import Layout, Stacked

# Transforms err by about 2e-16 of the product of the norms of what is convolved, so a normaliser above this part of
# that product is good to about 1e-10.
_SAFE = 2e-6
_TINY = 1e-140  # normalisers whose inverse squares overflow soon
_NEAR = 32  # distances next to the query

Queries = Float64[Tensor, "system text query"]


class FourierSums:
    """As ``AttentionSums``, of the queries whose sums are not spoiled by rounding.

    On a grid where query ``t`` sees key ``j`` at distance ``low + t - j``, ``Z[t] = Σ_j e^{d[t - j]} e^{k[j]}``. No
    exponential is above 1, as a constant moves from the keys of a band to its distances.

    Attributes:
        unsafe: tiles that hold the other queries.
        log_z, marginals: with 0 for those.
    """

    unsafe: list[slice]
    log_z: Queries
    marginals: Stacked

    def __init__(self, layout: Layout, stacked: Stacked, tiles: list[slice]) -> None:
        """Evaluate at these coefficients; queries are left out by whole tiles."""
        self._layout = layout
        self._length = 1 << (layout.n_key + layout.n_distance - 2).bit_length()
        self._first = layout.offset - layout.low
        by_distance, by_key = layout.split(stacked)
        member = layout.band == torch.arange(layout.n_band, device=stacked.device)[:, None]
        level = by_key.masked_fill(~layout.keys[..., None, :], -torch.inf).amax(-1, keepdim=True)
        logits = (by_distance[..., None, :] + level).masked_fill(~member, -torch.inf)
        shift = logits.amax((-2, -1))
        distance, key = (logits - shift[..., None, None]).exp_(), (by_key - level).exp_() * layout.keys[..., None, :]
        self._near: _Near | None = None
        self._bands = list(range(layout.n_band))  # those that are transformed
        z, bad = self._transform(distance, key)
        if bool(bad.any()):
            self._near = _Near(layout)
            close = self._near.distances
            cells = self._near.of_keys(key) * distance[..., close].sum(-2)[..., None, :]
            far = torch.cat([layout.band[: close.start], layout.band[close.stop :]]).unique().tolist()
            self._bands = far or [0]
            distance = distance.index_fill(-1, torch.arange(close.start, close.stop, device=distance.device), 0.0)
            z, bad = self._transform(distance[..., self._bands, :], key[..., self._bands, :], cells.sum(-1))
        touched = {
            query // (tiles[0].stop - tiles[0].start) for query in bad.flatten(0, -2).any(0).nonzero()[:, 0].tolist()
        }
        self.unsafe = [tiles[t] for t in sorted(touched)]
        safe = layout.queries.expand(z.shape).clone()
        for rows in self.unsafe:
            safe[..., rows] = False
        self.log_z = torch.where(safe, z.log() + shift[..., None], 0.0)
        self._inverse = torch.where(safe, 1 / z, 0.0)
        if self._near is not None:
            self._cells = cells.mul_(self._inverse[..., None])
        self._spectrum_of_inverse = self._spectrum_of_queries(self._inverse)
        to_distance = self._spectrum_of_inverse * self._key_spectrum.conj()
        to_key = self._spectrum_of_inverse * self._distance_spectrum.conj()
        self._far = self._stacked(to_distance, to_key, self._distance, self._key)
        self.marginals = self._far if self._near is None else self._near.add(self._cells, self._far.clone())

    def _transform(self, distance: Tensor, key: Tensor, near: Queries | float = 0.0) -> tuple[Queries, Tensor]:
        """Normalisers, and for which of them rounding is not negligible."""
        self._distance, self._key = distance, key
        self._distance_spectrum, self._key_spectrum = self._spectrum(distance), self._spectrum(key)
        z = self._at_queries(self._distance_spectrum * self._key_spectrum) + near
        norms = torch.linalg.vector_norm(distance, dim=-1) * torch.linalg.vector_norm(key, dim=-1)
        return z, ((z < _SAFE * norms.sum(-1, keepdim=True)) | (z < _TINY)) & self._layout.queries

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
        """Spectra as sums for each coefficient, weighted with these exponentials."""
        of_distance = (distance * self._inverse_transform(to_distance, self._layout.n_distance)).sum(-2)
        of_key = key * self._inverse_transform(to_key, self._layout.n_key)
        if len(self._bands) < self._layout.n_band:
            others = torch.zeros_like(of_key[..., :1, :]).expand(*of_key.shape[:-2], self._layout.n_band, -1)
            of_key = others.index_copy(-2, torch.tensor(self._bands, device=of_key.device), of_key)
        return torch.cat([of_distance, of_key.flatten(-2)], -1)

    def diagonal(self) -> Stacked:
        """These queries' part of ``AttentionSums.diagonal``."""
        squares = self._spectrum_of_queries(self._inverse.square())
        distance, key = self._distance.square(), self._key.square()
        to_distance, to_key = squares * self._spectrum(key).conj(), squares * self._spectrum(distance).conj()
        removed = self._stacked(to_distance, to_key, distance, key)
        return self.marginals - (removed if self._near is None else self._near.add(self._cells.square(), removed))

    def product(self, x: Stacked) -> Stacked:
        """These queries' part of ``AttentionSums.product``."""
        by_distance, by_key = self._layout.split(x)
        distance = self._spectrum(self._distance * by_distance[..., None, :])
        key = self._spectrum(self._key * (by_key if self._near is None else by_key[..., self._bands, :]))
        mean = self._at_queries(distance * self._key_spectrum + self._distance_spectrum * key) * self._inverse
        if self._near is not None:
            near = self._near.of_keys(by_key) + by_distance[..., None, self._near.distances]
            mean += (near * self._cells).sum(-1)
        removed = self._spectrum_of_queries(mean * self._inverse)
        to_distance = self._spectrum_of_inverse * key.conj() - removed * self._key_spectrum.conj()
        to_key = self._spectrum_of_inverse * distance.conj() - removed * self._distance_spectrum.conj()
        out = self._stacked(to_distance, to_key, self._distance, self._key).addcmul_(self._far, x)
        if self._near is not None:
            self._near.add(near.sub_(mean[..., None]).mul_(self._cells), out)
        return out


class _Near:
    """Cells at the distances next to the query, as ``[..., query, distance]``."""

    def __init__(self, layout: Layout) -> None:
        first = max(layout.low, -(_NEAR // 2) if layout.low < 0 else 0)
        first = first if first <= layout.high else layout.low
        stop = min(layout.high + 1, first + _NEAR)
        self._layout = layout
        self.distances = slice(first - layout.low, stop - layout.low)
        self._start = layout.offset - first  # the key that the first query sees at the first distance
        self._bands: list[tuple[int, slice]] = []
        for band in layout.band[self.distances].unique().tolist():
            some = (layout.band[self.distances] == band).nonzero()[:, 0]
            self._bands.append((band, slice(int(some[0]), int(some[-1]) + 1)))

    def of_keys(self, by_key: Float64[Tensor, "system text band key"]) -> Float64[Tensor, "system text query near"]:
        """The coefficient of each cell's key in the cell's band; 0 where there is no key."""
        parts = []
        for band, some in self._bands:
            n, first = some.stop - some.start, self._start - some.stop + 1
            x = pad(by_key[..., band, :], (-first, first + self._layout.n_query + n - 1 - self._layout.n_key))
            parts.append(x.unfold(-1, n, 1).flip(-1))
        return torch.cat(parts, -1)

    def add(self, cells: Float64[Tensor, "system text query near"], sums: Stacked) -> Stacked:
        """Add the sums of cells along distances and keys to ``sums``; cells without a key must be 0."""
        by_distance, by_key = self._layout.split(sums)
        by_distance[..., self.distances] += cells.sum(-2)
        n, n_key = cells.shape[-1], self._layout.n_key
        rows = pad(cells, (0, 0, self._start, n_key - self._start + n - 1 - self._layout.n_query)).contiguous()
        of_key = rows.as_strided((*rows.shape[:-2], n_key, n), (*rows.stride()[:-2], n, n + 1))  # row = key + column
        for band, some in self._bands:
            by_key[..., band, :] += of_key[..., some].sum(-1)
        return sums
