"""Normalisers and marginals of additive attention, and products with the Hessian of its divergence.

Queries of a band of distances are summed by Fourier transforms (``fourier``), in O(length · log length). Tiles of
queries of which rounding would be seen, and other masks, are formed cell by cell in the log domain.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.attention.fourier import FourierSums
from tl_posdisent.additive.attention.layout import Layout, Stacked

_TILE = 64  # queries that are formed cell by cell together
_STORED = 2**26  # cells of a pattern that are kept from one product to the next; beyond, they are formed anew


class AttentionSums:
    """Additive attention with given coefficients: all that a step of Newton's method asks of it.

    Attributes:
        log_z: logarithm of the normaliser of each query; 0 for a query without cells.
        marginals: total attention of each distance, and of each key in each band, stacked.
        diagonal: of the Hessian of ``Σ log Z``, sums of ``p (1 - p)``; by transforms to about 1e-5 of the marginals.
        tiles: queries that are formed cell by cell.
    """

    log_z: Float64[Tensor, "system text query"]
    marginals: Stacked
    diagonal: Stacked
    tiles: list[slice]

    def __init__(self, layout: Layout, stacked: Stacked, *, direct: bool = False) -> None:
        """Evaluate at these coefficients; ``direct`` forms every cell."""
        self._layout, self._stacked = layout, stacked
        self.tiles = [slice(t, min(t + _TILE, layout.n_query)) for t in range(0, layout.n_query, _TILE)]
        self._fourier: FourierSums | None = None
        if layout.mask is None and not direct:
            self._fourier = FourierSums(layout, stacked, self.tiles)
            self.tiles = self._fourier.unsafe
            self.log_z, self.marginals = self._fourier.log_z.clone(), self._fourier.marginals.clone()
            self.diagonal = self._fourier.diagonal()
        else:
            self.log_z = stacked.new_zeros(*stacked.shape[:-1], layout.n_query)
            self.marginals, self.diagonal = torch.zeros_like(stacked), torch.zeros_like(stacked)
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
            layout.add_sums(self.diagonal, pattern * (1 - pattern), rows, layout.columns(rows))
        used = layout.counts > 0
        self.marginals *= used  # where there are no cells, transforms leave rounding errors
        self.diagonal *= used

    def product(self, x: Stacked) -> Stacked:
        """Product of the Hessian of ``Σ log Z`` with ``x``: marginals of the pattern times ``x - mean per query``.

        Systems of ``x`` broadcast against those of the coefficients.
        """
        out = torch.zeros_like(x) if self._fourier is None else self._fourier.product(x)
        for rows, columns, pattern in self._patterns():
            weighted = self._layout.spread(x, rows, columns).mul_(pattern)
            mean = weighted.sum(-1, keepdim=True)
            self._layout.add_sums(out, weighted.addcmul_(pattern, mean, value=-1), rows, columns)
        return out.mul_(self._layout.counts > 0)

    def _logits(self, rows: slice) -> Float64[Tensor, "system text row column"]:
        columns = self._layout.columns(rows)
        cells = self._layout.spread(self._stacked, rows, columns)
        return cells.masked_fill_(~self._layout.inside(rows, columns), -torch.inf)

    def _patterns(self) -> Iterator[tuple[slice, slice, Float64[Tensor, "system text row column"]]]:
        for n, rows in enumerate(self.tiles):
            if self._stored is not None:
                pattern = self._stored[n]
            else:
                pattern = self._logits(rows).sub_(self.log_z[..., rows, None]).exp_()
            yield rows, self._layout.columns(rows), pattern
