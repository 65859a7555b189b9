"""Attention at the distances next to the query, cell by cell.

There a profile is steepest, and what is summed by Fourier transforms errs by a part of its largest term.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

NEAR = 32  # distances


class NearCells:
    """Cells at distances ``first … first + n - 1``, in two layouts: by query, and by key.

    With the column c for the distance ``first + n - 1 - c``, the keys of query t are a window of a vector of keys, and
    with the column s for ``first + s`` the queries of key j are a window of a vector of queries. Windows are views.

    Attributes:
        normaliser: ``[system, text, query]``, the sums of ``e^d e^k`` over these cells.
    """

    normaliser: Float64[Tensor, "system text query"]

    def __init__(
        self,
        distance: Float64[Tensor, "system text n"],
        key: Float64[Tensor, "system text band key"],
        bands: list[tuple[int, slice]],
        *,
        shift: int,
        n_query: int,
    ) -> None:
        """
        Args:
            distance: exponentials of the coefficients of these distances.
            key: of the keys, 0 where a key has no cells.
            bands: each band that has some of these distances, and which.
            shift: the key that the first query sees at the first distance.
            n_query: queries.
        """
        self._n, self._n_query, self._n_key = distance.shape[-1], n_query, key.shape[-1]
        self._distance, self._key, self._bands, self._shift = distance, key, bands, shift
        self._weights = self._windows_of_keys(key) * distance.flip(-1)[..., None, :]
        self.normaliser = self._weights.sum(-1)

    def normalise(self, inverse: Float64[Tensor, "system text query"]) -> None:
        """Make a pattern of it: 1 over the normalisers of all cells, 0 for queries that are left out."""
        self._by_query = self._weights.mul_(inverse[..., None])
        self._by_key = self._windows_of_queries(inverse) * self._distance[..., None, :]
        for band, some in self._bands:
            self._by_key[..., some] *= self._key[..., band, :, None]

    def marginals(self, *, squared: bool = False) -> tuple[Tensor, Tensor]:
        """Total attention (or squares of it) of these distances ``[..., n]``, and of each key ``[..., band, key]``."""
        by_query, by_key = (x.square() if squared else x for x in (self._by_query, self._by_key))
        return by_query.sum(-2).flip(-1), self._of_bands(by_key)

    def mean(
        self, distance: Float64[Tensor, "system text n"], key: Float64[Tensor, "system text band key"]
    ) -> tuple[Float64[Tensor, "system text query"], Float64[Tensor, "system text n"]]:
        """For coefficients x, ``Σ p x`` of each query; and the part of x of the keys, summed for each distance."""
        of_keys = self._windows_of_keys(key) * self._by_query
        mean = (self._by_query @ distance.flip(-1)[..., None])[..., 0] + of_keys.sum(-1)
        return mean, of_keys.sum(-2).flip(-1)

    def product(
        self, distance: Float64[Tensor, "system text n"], mean: Float64[Tensor, "system text query"]
    ) -> tuple[Tensor, Tensor]:
        """What is left of the Hessian's product: ``-Σ p mean`` for each distance, and ``Σ p (x - mean)`` for each key,
        with x of the distances."""
        of_distance = -(mean[..., None, :] @ self._by_query)[..., 0, :].flip(-1)
        of_key = self._of_bands((distance[..., None, :] - self._windows_of_queries(mean)).mul_(self._by_key))
        return of_distance, of_key

    def _of_bands(self, by_key: Tensor) -> Tensor:
        sums = torch.zeros_like(self._key).expand(*by_key.shape[:-2], *self._key.shape[-2:]).clone()
        for band, some in self._bands:
            sums[..., band, :] = by_key[..., some].sum(-1)
        return sums

    def _windows_of_keys(self, key: Tensor) -> Tensor:
        """``[..., query, c]``, for each distance the coefficient of its band."""
        first, n = self._shift - self._n + 1, self._n_query + self._n - 1
        if len(self._bands) == 1:
            return _cut(key[..., self._bands[0][0], :], first, n).unfold(-1, self._n, 1)
        parts = []
        for band, some in reversed(self._bands):
            left = self._n - some.stop
            x = _cut(key[..., band, :], first + left, self._n_query + some.stop - some.start - 1)
            parts.append(x.unfold(-1, some.stop - some.start, 1))
        return torch.cat(parts, -1)

    def _windows_of_queries(self, x: Tensor) -> Tensor:
        """``[..., key, s]``."""
        return _cut(x, -self._shift, self._n_key + self._n - 1).unfold(-1, self._n, 1)


def _cut(x: Tensor, start: int, n: int) -> Tensor:
    """``x[..., start : start + n]``, with 0 before its beginning and after its end."""
    return torch.nn.functional.pad(x, (-start, start + n - x.shape[-1]))
