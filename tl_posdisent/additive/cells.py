"""Masks as sets of (query, key) cells of a score matrix.

The additive model gives every cell ``a[distance] + b[query] + c[key]``. Fits need *marginals*: sums over the cells of
each distance, query and key. ``Cells.add_sums`` is the one reader of such sums of a matrix (of scores in
``read_marginals``, of attention in ``attention/``); ``Cells.product`` computes those of the additive model itself.
Coefficients and marginals are *stacked* in one vector: distances, queries, keys. There are two kinds of cell sets,
``ConvexCells`` (no gaps in rows, columns and diagonals) and ``Scattered`` (any mask). They differ in how they compute
``product``, and every fit takes either; ``make_cells`` chooses. The last query is at the last key: query ``i`` has
position ``i + n_key - n_query``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer

AnyCells = TypeVar("AnyCells", bound="Cells")
T = TypeVar("T")


class Parts(NamedTuple):
    """The three parts of a stacked vector."""

    distance: Tensor
    query: Tensor
    key: Tensor


@dataclass(frozen=True, eq=False)
class Cells(ABC):
    """A set of cells, or one set for each score matrix; leading axes broadcast against those of the scores.

    Attributes:
        n_query, n_key: size of the score matrices; the last query is at the last key.
        low, high: the lowest and the highest distance that occur (in any of the sets).
        counts: number of cells of each distance, query and key, stacked; float64, as they are weights.
    """

    n_query: int
    n_key: int
    low: int
    high: int
    counts: Float64[Tensor, "*mask coefficient"]

    @property
    def offset(self) -> int:
        """Position of the first query: the number of keys before it."""
        return self.n_key - self.n_query

    @property
    def n_distance(self) -> int:
        return self.high - self.low + 1

    @property
    def n_cells(self) -> Float64[Tensor, "*mask"]:
        return self.split(self.counts).query.sum(-1)

    @property
    def distances(self) -> Int64[Tensor, " distance"]:
        return torch.arange(self.low, self.high + 1, device=self.counts.device)

    def split(self, stacked: Tensor) -> Parts:
        """Split a stacked vector into views of its three parts."""
        return Parts(*stacked.split((self.n_distance, self.n_query, self.n_key), -1))

    def columns(self, rows: slice) -> slice:
        """Return the range of keys that some of these queries can see."""
        left = max(0, rows.start + self.offset - self.high)
        right = min(self.n_key, rows.stop + self.offset - self.low)
        return slice(min(left, right), right)

    def add_sums(self, sums: Float64[Tensor, "*batch coefficient"], block: Tensor, rows: slice, columns: slice) -> None:
        """Add a block's sums over each distance, query and key to ``sums``; it must be 0 where no cell counts."""
        by_distance, by_query, by_key = self.split(sums)
        shift = rows.start + self.offset - columns.start  # distance of the block's first cell
        n_row, n_column = block.shape[-2:]
        low, high = max(self.low, shift - n_column + 1), min(self.high, shift + n_row - 1)
        by_distance[..., low - self.low : high - self.low + 1] += diagonal_sums(block, low - shift, high - shift)
        by_query[..., rows] += block.sum(-1)
        by_key[..., columns] += block.sum(-2)

    def spread(
        self, stacked: Float64[Tensor, "*batch coefficient"], rows: slice, columns: slice
    ) -> Float64[Tensor, "*batch row column"]:
        """Add the coefficients of distance and key at each cell of a block; arbitrary at distances without cells."""
        by_distance, _, by_key = self.split(stacked)
        n_row, n_column = rows.stop - rows.start, columns.stop - columns.start
        if not n_column:
            return stacked.new_zeros(*stacked.shape[:-1], n_row, 0)
        last = rows.stop - 1 + self.offset - columns.start  # distance of the last row's first cell
        d = torch.arange(last, last - n_row - n_column + 1, -1, device=stacked.device).clamp(self.low, self.high)
        # Each row is a window of the distances that begins one entry before that of the row above.
        windows = by_distance[..., d - self.low].unfold(-1, n_column, 1).flip(-2)
        return windows.add_(by_key[..., None, columns])

    @abstractmethod
    def inside(
        self, rows: slice, columns: slice, which: Int64[Tensor, " matrix"] | None = None
    ) -> Bool[Tensor, "*mask row column"]:
        """Return a mask of the block's cells that are in the set; ``which`` selects sets by flat leading index."""

    @abstractmethod
    def product(self, x: Float64[Tensor, "*batch coefficient"]) -> Float64[Tensor, "*batch coefficient"]:
        """Multiply the normal matrix by ``x``: the marginals of the model with these coefficients."""

    def to_mask(self) -> Bool[Tensor, "*mask query key"]:
        return self.inside(slice(0, self.n_query), slice(0, self.n_key))

    def to(self: AnyCells, device: torch.device | str) -> AnyCells:
        return on_device(self, device)


def on_device(x: T, device: torch.device | str) -> T:
    """Copy a dataclass to another device, with all fields that can be moved (tensors, cells)."""
    values = ((field.name, getattr(x, field.name)) for field in fields(x))  # type: ignore[arg-type]
    moved: Any = {name: value.to(device) for name, value in values if hasattr(value, "to")}
    return replace(x, **moved)  # type: ignore[type-var]


def cell_distances(n_query: int, n_key: int, device: torch.device | str | None = None) -> Int64[Tensor, "query key"]:
    """Compute the distance of every cell: query position minus key position."""
    i = torch.arange(n_query, device=device) + (n_key - n_query)
    return i[:, None] - torch.arange(n_key, device=device)


def distance_range(mask: Bool[Tensor, "*mask query key"]) -> tuple[int, int]:
    """Return the lowest and the highest distance with a cell in any of the masks."""
    n_query, n_key = mask.shape[-2:]
    used = cell_distances(n_query, n_key, mask.device)[mask.reshape(-1, n_query, n_key).any(0)]
    return int(used.min()), int(used.max())


def by_distance(mask: Bool[Tensor, "*mask query key"], low: int, high: int) -> Bool[Tensor, "*mask query distance"]:
    """Lay a mask out by query and distance: ``out[i, d - low]`` is the cell of query ``i`` at distance ``d``."""
    n_query, n_key = mask.shape[-2:]
    distance = torch.arange(low, high + 1, device=mask.device)
    key = torch.arange(n_query, device=mask.device)[:, None] + (n_key - n_query) - distance
    exists = (key >= 0) & (key < n_key)
    index = key.clamp(0, n_key - 1).expand(*mask.shape[:-2], *key.shape)
    return mask.gather(-1, index) & exists


def diagonal_sums(x: Float64[Tensor, "*batch row column"], low: int, high: int) -> Float64[Tensor, "*batch diagonal"]:
    """Sum ``x`` along each diagonal ``row - column = low … high``; ``x`` must be 0 on all others.

    A matrix of width n, reshaped to width n + 1, has every diagonal as a column: the sums need no index, and no
    copy unless there are more diagonals than columns.
    """
    columns = x.shape[-1]
    width = max(columns, high - low)  # so that no two of the requested diagonals share a column
    if width > columns:
        x = torch.nn.functional.pad(x, (0, width - columns))
    flat = x.flatten(-2)
    rows = flat.shape[-1] // (width + 1)
    whole = rows * (width + 1)
    sums = flat[..., :whole].reshape(*x.shape[:-2], rows, width + 1).sum(-2)
    tail = flat[..., whole:]
    sums[..., : tail.shape[-1]] += tail
    return sums[..., -torch.arange(low, high + 1, device=x.device) % (width + 1)]


Span = tuple[Tensor, Tensor]  # half-open: first, and one past the last; equal if the span is empty


@dataclass(frozen=True, eq=False)
class ConvexCells(Cells):
    """Cells whose rows, columns and diagonals have no gaps: causal, full, windowed and padded masks.

    The sum of the model over a span is a difference of two cumulative sums, so a product takes O(length), without a
    matrix.

    Attributes:
        first_key, stop_key: the span of keys of each query, half-open.
        first_query, stop_query: the span of queries of each distance, half-open.
        starts, stops: where the two spans of each coefficient begin and end in the cumulative sum of a stacked vector.
            The cells of a distance form spans of queries and keys, those of a query spans of keys and distances, and
            those of a key spans of queries and distances.
    """

    first_key: Int64[Tensor, "*mask query"]
    stop_key: Int64[Tensor, "*mask query"]
    first_query: Int64[Tensor, "*mask distance"]
    stop_query: Int64[Tensor, "*mask distance"]
    starts: Int64[Tensor, "*mask two_per_coefficient"]
    stops: Int64[Tensor, "*mask two_per_coefficient"]

    @classmethod
    def band(
        cls, n_query: int, n_key: int, low: int, high: int, device: torch.device | str, *, sinks: int = 0
    ) -> ConvexCells:
        """Create the cells with ``low <= distance <= high``, without the first ``sinks`` keys."""
        offset = n_key - n_query
        i, j = (torch.arange(n, device=device) for n in (n_query, n_key))
        d = torch.arange(low, high + 1, device=device)
        keys_of_query = _clipped((i + offset - high).clamp_min(sinks), i + offset - low + 1, n_key)
        first, stop = _clipped(j - offset + low, j - offset + high + 1, n_query)
        queries_of_key = first, torch.where(j < sinks, first, stop)
        queries_of_distance = _clipped(d - offset + sinks, d - offset + n_key, n_query)
        return cls._from_spans(n_query, n_key, low, keys_of_query, queries_of_key, queries_of_distance)

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "*mask query key"]) -> ConvexCells | None:
        """Convert a boolean mask, or return None if some row, column or diagonal has a gap."""
        n_query, n_key = mask.shape[-2:]
        low, high = distance_range(mask)
        spans = []
        for view in (mask.mT, mask, by_distance(mask, low, high)):
            span = _find_span(view)
            if span is None:
                return None
            spans.append(span)
        return cls._from_spans(n_query, n_key, low, *spans)

    @classmethod
    def _from_spans(
        cls, n_query: int, n_key: int, low: int, keys_of_query: Span, queries_of_key: Span, queries_of_distance: Span
    ) -> ConvexCells:
        n_distance, offset, device = queries_of_distance[0].shape[-1], n_key - n_query, keys_of_query[0].device
        i, j, d = (torch.arange(n, device=device) for n in (n_query, n_key, n_distance))
        spans = (queries_of_distance, keys_of_query, queries_of_key)
        queries, keys = n_distance, n_distance + n_query  # where these begin in a stacked vector; distances at 0
        (d_start, d_stop), (q_start, q_stop), (k_start, k_stop) = spans
        # Distance d has the keys i - d of its queries i, query i has the distances i - j of its keys j, and so on.
        key, distance_up, distance_down = keys + offset - low - d, offset - low - j, offset - low + i + 1
        starts = [queries + d_start, keys + q_start, queries + k_start]
        stops = [queries + d_stop, keys + q_stop, queries + k_stop]
        starts += [key + d_start, distance_down - q_stop, distance_up + k_start]
        stops += [key + d_stop, distance_down - q_start, distance_up + k_stop]
        counts = torch.cat([stop - start for start, stop in spans], -1).double()
        last = counts.shape[-1]  # an empty span may be anywhere, as its two ends are equal
        ends = (torch.cat(x, -1).clamp(0, last) for x in (starts, stops))
        return cls(n_query, n_key, low, low + n_distance - 1, counts, q_start, q_stop, d_start, d_stop, *ends)

    def inside(
        self, rows: slice, columns: slice, which: Int64[Tensor, " matrix"] | None = None
    ) -> Bool[Tensor, "*mask row column"]:
        first, stop = (x[..., rows, None] for x in (self.first_key, self.stop_key))
        if which is not None:
            first, stop = (x.reshape(-1, *x.shape[-2:])[which] for x in (first, stop))
        key = torch.arange(columns.start, columns.stop, device=first.device)
        return (key >= first) & (key < stop)

    def product(self, x: Float64[Tensor, "*batch coefficient"]) -> Float64[Tensor, "*batch coefficient"]:
        if self.n_query < 16 * self.n_distance:
            return torch.addcmul(self._span_sums(x), self.counts, x)
        # The sum of a short span is a small difference of two large sums, so these must be exact. The leading bits of
        # the numbers, as multiples of one unit, add up without rounding; the remainders are small.
        bits = torch.frexp(x.abs().amax(-1, keepdim=True) * x.shape[-1]).exponent
        unit = torch.exp2(bits - 52.0)
        leading = (x / unit).round_().mul_(unit)
        return torch.addcmul(self._span_sums(leading) + self._span_sums(x - leading), self.counts, x)

    def _span_sums(self, x: Tensor) -> Tensor:
        """Sum the other two components over the cells of each coefficient."""
        total = torch.nn.functional.pad(x.cumsum(-1), (1, 0))
        n, shape = x.shape[-1], (*x.shape[:-1], self.starts.shape[-1])
        # Gathering over an expanded index is several times faster than index_select and take_along_dim.
        sums = total.gather(-1, self.stops.expand(shape)) - total.gather(-1, self.starts.expand(shape))
        return sums[..., :n] + sums[..., n:]


def _clipped(start: Tensor, stop: Tensor, n: int) -> Span:
    start = start.clamp(0, n)
    return start, torch.maximum(stop.clamp(0, n), start)


def _find_span(mask: Bool[Tensor, "*mask n columns"]) -> Span | None:
    """Find the span of True in every column, or return None if a column has a gap."""
    begins = mask.clone()
    begins[..., 1:, :] &= ~mask[..., :-1, :]
    if bool((begins.sum(-2) > 1).any()):
        return None
    start = begins.to(torch.uint8).argmax(-2)
    return start, start + mask.sum(-2)


@dataclass(frozen=True, eq=False)
class Scattered(Cells):
    """Cells in any arrangement: packed documents, sinks, random masks.

    Attributes:
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
        low, high = distance_range(mask)
        query_distance = by_distance(mask, low, high)
        # In reversed order, keys take the place of queries, and distances are shifted by `offset`.
        offset = n_key - n_query
        key_distance = by_distance(mask.mT.flip(-1, -2), low - offset, high - offset).flip(-2)
        counts = torch.cat([query_distance.sum(-2), mask.sum(-1), mask.sum(-2)], -1)
        laid_out = (x.double() for x in (mask, query_distance, key_distance))
        return cls(n_query, n_key, low, high, counts.double(), mask, *laid_out)

    def inside(
        self, rows: slice, columns: slice, which: Int64[Tensor, " matrix"] | None = None
    ) -> Bool[Tensor, "*mask row column"]:
        mask = self.mask[..., rows, columns]
        return mask if which is None else mask.reshape(-1, *mask.shape[-2:])[which]

    def product(self, x: Float64[Tensor, "*batch coefficient"]) -> Float64[Tensor, "*batch coefficient"]:
        a, b, c = self.split(x)
        over_first, over_second = "...n,...nm->...m", "...m,...nm->...n"
        from_others = (
            torch.einsum(over_first, b, self.query_distance) + torch.einsum(over_first, c, self.key_distance),
            torch.einsum(over_second, c, self.query_key) + torch.einsum(over_second, a, self.query_distance),
            torch.einsum(over_first, b, self.query_key) + torch.einsum(over_second, a, self.key_distance),
        )
        return torch.addcmul(torch.cat(from_others, -1), self.counts, x)


MaskKind = Literal["causal", "full"]


def make_cells(
    shape: Sequence[int],
    mask: MaskKind | Bool[Tensor, "*mask query key"],
    window: int | None = None,
    *,
    sinks: int = 0,
    device: torch.device | str = "cpu",
) -> Cells:
    """Convert ``mask``, ``window`` and ``sinks`` to the cells of scores of this shape, ``(*batch, query, key)``.

    Raises:
        ValueError: an unknown mask, a mask of another size or dtype, a window below 1, sinks below 0, no cells left.
    """
    if window is not None:
        window = check_integer("window", window, 1)
    sinks = check_integer("sinks", sinks, 0)
    if sinks >= shape[-1]:
        raise ArgumentError("sinks", f"must be fewer than the {shape[-1]} keys, got {sinks}")
    if isinstance(mask, Tensor):
        mask = _checked(mask, shape, window, sinks).to(device)
        return ConvexCells.from_mask(mask) or Scattered.from_mask(mask)
    if not (isinstance(mask, str) and mask in get_args(MaskKind)):
        what = repr(mask) if isinstance(mask, str) else type(mask).__name__
        raise ArgumentError("mask", f'must be "causal", "full" or a boolean tensor, got {what}')
    n_query, n_key = shape[-2:]
    if n_query > n_key:
        raise ArgumentError(
            "scores",
            f"must have shape (..., query, key) with the last query at the last key, got {n_query} queries and "
            f"{n_key} keys; q, k, v and z (batch, pos, head, d_head) and a residual stream (batch, pos, d_model) are "
            "not scores",
        )
    low, high = (0 if mask == "causal" else 1 - n_query), n_key - 1 - sinks
    if window is not None:
        low, high = max(low, 1 - window), min(high, window - 1)
    return ConvexCells.band(n_query, n_key, low, high, device, sinks=sinks)


def _checked(mask: Tensor, shape: Sequence[int], window: int | None, sinks: int) -> Tensor:
    """Validate a boolean mask; return it cut to the window, without sinks, with 2 axes or those of the scores."""
    n_query, n_key = shape[-2:]
    if mask.dtype != torch.bool:
        raise ArgumentError(
            "mask",
            f"must have dtype torch.bool (True where a cell counts), got {mask.dtype}; "
            "convert an additive or 0/1 mask yourself: its values do not show what it means",
        )
    if mask.ndim < 2 or tuple(mask.shape[-2:]) != (n_query, n_key):
        raise ArgumentError("mask", f"must have shape (..., {n_query}, {n_key}) as the scores, got {tuple(mask.shape)}")
    leading, batch = tuple(mask.shape[:-2]), tuple(shape[:-2])
    aligned = (1,) * (len(batch) - len(leading)) + leading
    if len(aligned) > len(batch) or any(m not in (1, n) for m, n in zip(aligned, batch, strict=True)):
        raise ArgumentError("mask", f"must broadcast to the scores' shape {tuple(shape)}, got {tuple(mask.shape)}")
    if window is not None:
        mask = mask & (cell_distances(n_query, n_key, mask.device).abs() < window)
    if sinks:
        mask = mask & (torch.arange(n_key, device=mask.device) >= sinks)
    filled = mask.flatten(-2).any(-1)
    if not bool(filled.all()):
        raise ArgumentError(
            "mask",
            f"must leave at least one cell, got a mask of shape {tuple(mask.shape)} that leaves none"
            + (f" at leading index {tuple((~filled).nonzero()[0].tolist())}" if leading else ""),
        )
    shared = all(n == 1 for n in leading)
    return mask.reshape((n_query, n_key) if shared else (*aligned, n_query, n_key))
