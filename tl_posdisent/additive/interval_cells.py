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
    def band(cls, n_query: int, n_key: int, low: int, high: int, device: torch.device | str) -> Runs:
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
        n_distance, offset, device = queries_of_distance[0].shape[-1], n_key - n_query, keys_of_query[0].device
        i, j, d = (torch.arange(n, device=device) for n in (n_query, n_key, n_distance))
        runs = (queries_of_distance, keys_of_query, queries_of_key)
        queries, keys = n_distance, n_distance + n_query  # where these begin in a stacked vector; distances at 0
        (d_start, d_stop), (q_start, q_stop), (k_start, k_stop) = runs
        # Distance d meets the keys i - d of its queries i, query i the distances i - j of its keys j, and so on.
        key, distance_up, distance_down = keys + offset - low - d, offset - low - j, offset - low + i + 1
        starts = [queries + d_start, keys + q_start, queries + k_start]
        stops = [queries + d_stop, keys + q_stop, queries + k_stop]
        starts += [key + d_start, distance_down - q_stop, distance_up + k_start]
        stops += [key + d_stop, distance_down - q_start, distance_up + k_stop]
        counts = torch.cat([stop - start for start, stop in runs], -1).double()
        last = counts.shape[-1]  # an empty run may lie anywhere: its two ends are equal
        return cls(
            n_query=n_query,
            n_key=n_key,
            low=low,
            high=low + n_distance - 1,
            counts=counts,
            first_key=q_start,
            stop_key=q_stop,
            first_query=d_start,
            stop_query=d_stop,
            starts=torch.cat(starts, -1).clamp(0, last),
            stops=torch.cat(stops, -1).clamp(0, last),
        )

    @property
    def is_narrow(self) -> bool:
        """Whether the sequence is many windows long."""
        return self.n_query >= 16 * self.n_distance

    def inside(
        self, rows: slice, columns: slice, which: Int64[Tensor, "matrix"] | None = None
    ) -> Bool[Tensor, "*mask row column"]:
        first, stop = (x[..., rows, None] for x in (self.first_key, self.stop_key))
        if which is not None:
            first, stop = (x.reshape(-1, *x.shape[-2:])[which] for x in (first, stop))
        key = torch.arange(columns.start, columns.stop, device=first.device)
        return (key >= first) & (key < stop)

    def product(self, x: Float64[Tensor, "*batch coefficient"]) -> Float64[Tensor, "*batch coefficient"]:
        if not self.is_narrow:
            return torch.addcmul(self._run_sums(x), self.counts, x)
        # A short run is a small difference of two large sums, so these must be exact. The leading bits of the
        # numbers, as multiples of one unit, add up without rounding; what is left of the numbers is small.
        bits = torch.frexp(x.abs().amax(-1, keepdim=True) * x.shape[-1]).exponent
        unit = torch.exp2(bits - 52.0)
        leading = (x / unit).round_().mul_(unit)
        return torch.addcmul(self._run_sums(leading) + self._run_sums(x - leading), self.counts, x)

    def _run_sums(self, x: Tensor) -> Tensor:
        """Sum of the other two components over the cells of each coefficient."""
        total = torch.nn.functional.pad(x.cumsum(-1), (1, 0))
        n, shape = x.shape[-1], (*x.shape[:-1], self.starts.shape[-1])
        # Gathering over an expanded index is several times faster than index_select and take_along_dim.
        sums = total.gather(-1, self.stops.expand(shape)) - total.gather(-1, self.starts.expand(shape))
        return sums[..., :n] + sums[..., n:]


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
