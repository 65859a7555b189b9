"""Cells in any arrangement: packed documents, attention sinks, random masks.

Here the marginals of the model are products with the mask and with its two skewed copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from .cells import Cells, by_distance, cell_distances


@dataclass(frozen=True, eq=False)
class Scattered(Cells):
    """The cells where ``mask`` is True.

    Attributes:
        mask: True where a cell counts.
        query_key, query_distance, key_distance: the mask as weights, laid out along its three pairs of axes.
    """

    mask: Bool[Tensor, "*mask query key"]
    query_key: Float64[Tensor, "*mask query key"]
    query_distance: Float64[Tensor, "*mask query distance"]
    key_distance: Float64[Tensor, "*mask key distance"]

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "*mask query key"]) -> Scattered:
        """Lay the mask out along its three pairs of axes."""
        n_query, n_key = mask.shape[-2:]
        used = cell_distances(n_query, n_key, mask.device)[mask.reshape(-1, n_query, n_key).any(0)]
        low, high = int(used.min()), int(used.max())
        query_distance = by_distance(mask, low, high)
        # Seen backwards, a key is a query whose last key stands at the last position too, that is `offset` off.
        offset = n_key - n_query
        key_distance = by_distance(mask.mT.flip(-1, -2), low - offset, high - offset).flip(-2)
        counts = [query_distance.sum(-2), mask.sum(-1), mask.sum(-2)]
        return cls(
            n_query=n_query,
            n_key=n_key,
            low=low,
            high=high,
            counts=torch.cat(counts, -1).double(),
            mask=mask,
            query_key=mask.double(),
            query_distance=query_distance.double(),
            key_distance=key_distance.double(),
        )

    def inside(
        self, rows: slice, columns: slice, which: Int64[Tensor, "matrix"] | None = None
    ) -> Bool[Tensor, "*mask row column"]:
        mask = self.mask[..., rows, columns]
        return mask if which is None else mask.reshape(-1, *mask.shape[-2:])[which]

    def product(self, x: Float64[Tensor, "*batch coefficient"]) -> Float64[Tensor, "*batch coefficient"]:
        a, b, c = self.split(x)
        from_others = (
            _product(b, self.query_distance) + _product(c, self.key_distance),
            _product(c, self.query_key.mT) + _product(a, self.query_distance.mT),
            _product(b, self.query_key) + _product(a, self.key_distance.mT),
        )
        return torch.addcmul(torch.cat(from_others, -1), self.counts, x)


def _product(x: Float64[Tensor, "*batch n"], weights: Float64[Tensor, "*mask n m"]) -> Tensor:
    if weights.ndim == 2:
        return x @ weights  # one matrix for all: one large product
    if weights.shape[-3] == 1:
        return x @ weights.squeeze(-3)  # one matrix for all heads of a text
    return (x[..., None, :] @ weights)[..., 0, :]
