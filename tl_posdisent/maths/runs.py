"""Cells whose rows, columns and diagonals have no gaps: causal, full, windowed and padded masks.

The sum of the model over a run is a difference of two cumulative sums, so a product with the normal matrix is one
cumulative sum and a few look-ups: O(length), and no matrix anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from .cells import Cells, by_distance, cell_distances

Run = tuple[Tensor, Tensor]  # half-open: first, and one past the last; equal if the run is empty


@dataclass(frozen=True, eq=False)
class Runs(Cells):
    """Cells without gaps.

    Attributes:
        first_key, stop_key: the run of keys of each query, half-open.
        first_query, stop_query: the run of queries of each distance, half-open.
        starts, stops: where in the cumulative sum of a stacked vector the two runs of each coefficient begin and
            end: a distance is met by queries and keys, a query by keys and distances, a key by queries and distances.
    """

    first_key: Int64[Tensor, "*mask query"]
    stop_key: Int64[Tensor, "*mask query"]
    first_query: Int64[Tensor, "*mask distance"]
    stop_query: Int64[Tensor, "*mask distance"]
    starts: Int64[Tensor, "*mask two_per_coefficient"]
    stops: Int64[Tensor, "*mask two_per_coefficient"]

    @classmethod
    def band(cls, n_query: int, n_key: int, low: int, high: int, device: torch.device) -> Runs:
        """All cells with ``low <= distance <= high``."""
        offset = n_key - n_query
        i, j = (torch.arange(n, device=device) for n in (n_query, n_key))
        d = torch.arange(low, high + 1, device=device)
        keys_of_query = _clipped(i + offset - high, i + offset - low + 1, n_key)
        queries_of_key = _clipped(j - offset + low, j - offset + high + 1, n_query)
        queries_of_distance = _clipped(d - offset, d - offset + n_key, n_query)
        return cls._from_runs(n_query, n_key, low, keys_of_query, queries_of_key, queries_of_distance)

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "*mask query key"]) -> Runs | None:
        """The cells of a boolean mask, or None if some row, column or diagonal has a gap."""
        n_query, n_key = mask.shape[-2:]
        used = cell_distances(n_query, n_key, mask.device)[mask.reshape(-1, n_query, n_key).any(0)]
        low, high = int(used.min()), int(used.max())
        runs = []
        for view in (mask.mT, mask, by_distance(mask, low, high)):
            run = _find_run(view)
            if run is None:
                return None
            runs.append(run)
        return cls._from_runs(n_query, n_key, low, *runs)

    @classmethod
    def _from_runs(
        cls, n_query: int, n_key: int, low: int, keys_of_query: Run, queries_of_key: Run, queries_of_distance: Run
    ) -> Runs:
        offset, device = n_key - n_query, keys_of_query[0].device
        n_distance = queries_of_distance[0].shape[-1]
        position = torch.arange(n_query, device=device) + offset
        j = torch.arange(n_key, device=device)
        d = torch.arange(low, low + n_distance, device=device)
        n = n_distance + n_query + n_key
        # Query i runs over keys [s, e): distances i-e+1 … i-s. Key j over queries [s, e): distances s-j … e-1-j.
        first = _joined(queries_of_distance, keys_of_query, queries_of_key)
        shifted = _joined(
            tuple(x + offset - d for x in queries_of_distance),
            tuple(position + 1 - low - x for x in reversed(keys_of_query)),
            tuple(x + offset - low - j for x in queries_of_key),
        )
        to_query, to_key = n_distance, n_distance + n_query  # where these begin in a stacked vector
        shift_first = _segments(n_distance, n_query, n_key, to_query, to_key, to_query, device)
        shift_second = _segments(n_distance, n_query, n_key, to_key, 0, 0, device)
        # The ends of an empty run may lie anywhere; they are equal.
        starts, stops = (
            torch.cat([(a + shift_first), (b + shift_second)], -1).clamp(0, n)
            for a, b in zip(first, shifted, strict=True)
        )
        return cls(
            n_query, n_key, low, low + n_distance - 1, (first[1] - first[0]).double(),
            *keys_of_query, *queries_of_distance, starts, stops,
        )  # fmt: skip

    def inside(
        self, rows: slice, columns: slice, which: Int64[Tensor, "matrix"] | None = None
    ) -> Bool[Tensor, "*mask row column"]:
        first, stop = (x[..., rows, None] for x in (self.first_key, self.stop_key))
        if which is not None:
            first, stop = (x.reshape(-1, *x.shape[-2:])[which] for x in (first, stop))
        key = torch.arange(columns.start, columns.stop, device=first.device)
        return (key >= first) & (key < stop)

    def product(self, x: Float64[Tensor, "*batch coefficient"]) -> Float64[Tensor, "*batch coefficient"]:
        total = torch.nn.functional.pad(x.cumsum(-1), (1, 0))
        if self.starts.ndim == 1:
            sums = total.index_select(-1, self.stops) - total.index_select(-1, self.starts)
        else:
            sums = total.take_along_dim(self.stops, -1) - total.take_along_dim(self.starts, -1)
        n = x.shape[-1]
        return torch.addcmul(sums[..., :n] + sums[..., n:], self.counts, x)


def _clipped(start: Tensor, stop: Tensor, n: int) -> Run:
    start = start.clamp(0, n)
    return start, torch.maximum(stop.clamp(0, n), start)


def _find_run(mask: Bool[Tensor, "*mask n columns"]) -> Run | None:
    """The run of True in every column, or None where one has a gap."""
    begins = mask.clone()
    begins[..., 1:, :] &= ~mask[..., :-1, :]
    if bool((begins.sum(-2) > 1).any()):
        return None
    start = begins.to(torch.uint8).argmax(-2)
    return start, start + mask.sum(-2)


def _joined(*runs: Run) -> Run:
    starts, stops = (torch.cat(ends, -1) for ends in zip(*runs, strict=True))
    return starts, stops
