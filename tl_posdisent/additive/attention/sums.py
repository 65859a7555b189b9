"""Additive attention with given coefficients: its normalisers and marginals, and products with its Hessian.

Coefficients and marginals are stacked as in ``cells.py``: distances, queries, keys. A softmax ignores what all keys of
a query share, so the coefficients of queries are 0.
"""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.attention.systems import Systems

Stacked = Float64[Tensor, "system text coefficient"]

_TILE_QUERIES = 64  # number of queries that are computed together
_MAX_STORED_CELLS = (
    2**25
)  # most cells of a pattern that are kept between products (256 MiB); beyond that, they are recomputed


class AttentionSums:
    """Additive attention with given coefficients: all that a step of Newton's method needs.

    Attributes:
        log_z: logarithm of the normaliser of each query; 0 for a query without cells.
        marginals: total attention of each distance, query (1 if it has cells) and key, stacked.
    """

    log_z: Float64[Tensor, "system text query"]
    marginals: Stacked

    def __init__(self, systems: Systems, stacked: Stacked, times: Float64[Tensor, " query"] | None = None) -> None:
        """Evaluate at these coefficients, each query counted so many ``times`` in all sums."""
        self._systems, self._stacked, self._times, cells = systems, stacked, times, systems.cells
        rows_of_tiles = (
            slice(t, min(t + _TILE_QUERIES, cells.n_query)) for t in range(0, cells.n_query, _TILE_QUERIES)
        )
        tiles = ((rows, cells.columns(rows)) for rows in rows_of_tiles)
        self._tiles = [(rows, columns) for rows, columns in tiles if columns.stop > columns.start]
        n_cells = sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in self._tiles)
        self._stored: list[Tensor] | None = [] if n_cells * stacked[..., 0].numel() <= _MAX_STORED_CELLS else None
        self.log_z = stacked.new_zeros(*stacked.shape[:-1], cells.n_query)
        self.marginals = torch.zeros_like(stacked)
        for rows, columns in self._tiles:
            logits = self._logits(rows, columns)
            z = logits.logsumexp(-1)
            self.log_z[..., rows] = torch.where(z > -torch.inf, z, 0.0)
            pattern = logits.sub_(self.log_z[..., rows, None]).exp_()
            if self._stored is not None:
                self._stored.append(pattern)
            self._add(self.marginals, pattern, rows, columns)

    @cached_property
    def diagonal(self) -> Stacked:
        """Diagonal of the Hessian of ``Σ log Z``: sums of ``p (1 - p)``, computed when a step needs them."""
        sums = torch.zeros_like(self._stacked)
        for n, (rows, columns) in enumerate(self._tiles):
            pattern = self._pattern(n)
            self._add(sums, pattern * (1 - pattern), rows, columns)
        return sums

    def product(self, x: Stacked) -> Stacked:
        """Multiply the Hessian of ``Σ log Z`` by ``x``: marginals of the pattern times ``x - mean per query``."""
        sums = torch.zeros_like(x)
        for n, (rows, columns) in enumerate(self._tiles):
            pattern = self._pattern(n)
            weighted = self._systems.cells.spread(x, rows, columns).mul_(pattern)
            mean = weighted.sum(-1, keepdim=True)
            self._add(sums, weighted.addcmul_(pattern, mean, value=-1), rows, columns)
        return sums

    def _add(self, sums: Stacked, block: Tensor, rows: slice, columns: slice) -> None:
        block = block if self._times is None else block * self._times[rows, None]
        self._systems.cells.add_sums(sums, block, rows, columns)

    def _pattern(self, tile: int) -> Float64[Tensor, "system text row column"]:
        """Return a tile's part of the pattern, which must not be written to."""
        if self._stored is not None:
            return self._stored[tile]
        rows, columns = self._tiles[tile]
        return self._logits(rows, columns).sub_(self.log_z[..., rows, None]).exp_()

    def _logits(self, rows: slice, columns: slice) -> Float64[Tensor, "system text row column"]:
        cells = self._systems.cells.spread(self._stacked, rows, columns)
        return cells.masked_fill_(~self._systems.inside(rows, columns), -torch.inf)
