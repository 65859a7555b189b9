"""Figures of each query's attention, from score matrices of long texts: a block of queries at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tl_posdisent.models.probe.observe import is_masked
from tl_posdisent.models.spec import AttentionSpec

_CELLS_PER_BLOCK = 2**22


def entropy_by_query(pattern: Float[Tensor, "batch head query key"]) -> Float64[Tensor, "batch head query"]:
    """Entropy of each query's attention, in nats."""
    rows = [torch.special.entr(pattern[:, :, some].float()).sum(-1, dtype=torch.float64) for some in _blocks(pattern)]
    return torch.cat(rows, -1)


def largest_by_query(
    scores: Float[Tensor, "batch head query key"], spec: AttentionSpec
) -> Float64[Tensor, "batch head query"]:
    """The largest score among the keys that a query sees."""
    rows = [x.masked_fill(~seen, -torch.inf).amax(-1).double() for x, seen in _visible(scores, spec)]
    return torch.cat(rows, -1)


def share_key(
    scores: Float[Tensor, "batch head query key"], spec: AttentionSpec, start: int = 0, stop: int | None = None
) -> Float64[Tensor, "batch head"]:
    """Share of the variance of the scores of some queries that the key alone explains.

    That of the means over queries, weighted by how many queries see the key: ``AdditiveFit.share_key`` of these rows,
    also where an intervention hides keys. NaN where the scores do not vary.
    """
    by_key = scores.new_zeros((*scores.shape[:2], scores.shape[-1]), dtype=torch.float64)
    count, total, squares = by_key, by_key, by_key[..., 0]
    pivot: Tensor | None = None
    for x, seen in _visible(scores, spec, start, stop):
        if pivot is None:  # near the mean, so that no large numbers are subtracted
            pivot = torch.where(seen, x, 0.0).double().sum((-2, -1)) / seen.sum((-2, -1))
        shifted = torch.where(seen, x.double() - pivot[..., None, None], 0.0)
        count = count + seen.sum(-2)
        total = total + shifted.sum(-2)
        squares = squares + shifted.square().sum((-2, -1))
    cells = count.sum(-1)
    mean = total.sum(-1) / cells
    variation = squares - cells * mean**2
    explained = torch.where(count > 0, (total - count * mean[..., None]) ** 2 / count, 0.0).sum(-1)
    return torch.where(variation > 1e-14 * squares, (explained / variation).clamp(0, 1), torch.nan)


def _blocks(cells: Tensor, start: int = 0, stop: int | None = None) -> Iterator[slice]:
    stop = cells.shape[2] if stop is None else stop
    rows = max(1, _CELLS_PER_BLOCK // max(1, cells[:, :, 0].numel()))
    for at in range(start, stop, rows):
        yield slice(at, min(at + rows, stop))


def _visible(
    scores: Tensor, spec: AttentionSpec, start: int = 0, stop: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of scores, and where a query of theirs sees a key: by the layer's mask, and not hidden by a hook."""
    position = torch.arange(scores.shape[-1], device=scores.device)
    for some in _blocks(scores, start, stop):
        block = scores[:, :, some]
        yield block, spec.sees(position[some, None] - position) & ~is_masked(block)
