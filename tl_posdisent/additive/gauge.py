"""One of the many equal solutions: the convention that makes components comparable."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from .cells import Cells, Parts


def fix_gauge(
    cells: Cells, weights: Float64[Tensor, "*mask coefficient"], solution: Tensor, *, pool: bool = False
) -> tuple[Float64[Tensor, "*batch"], Parts]:
    """The intercept, and the same model with components that have mean 0 and a key component without trend.

    Three changes leave every fitted value as it is: two constants that move between the components, and the
    straight line ``a[d] + t·d, b[i] − t·i, c[j] + t·j``. The convention: every component has mean 0 over the
    cells, and the least-squares slope of ``c`` over key positions, weighted by cells, is 0. Texts that are pooled
    share one distance profile, so there it is the slope over all of them.
    """
    numbers = cells.split(weights)
    key = torch.arange(cells.n_key, device=solution.device).double()
    lever = (key - _mean(key, numbers.key)) * numbers.key
    up, down = (lever * cells.split(solution).key).sum(-1, keepdim=True), (lever * key).sum(-1, keepdim=True)
    if pool:
        up, down = (x.expand_as(up).sum(0, keepdim=True) for x in (up, down))
    slope = torch.where(down > 0, up / down, 0.0)
    query = torch.arange(cells.n_query, device=solution.device) + cells.offset
    line = torch.cat([-cells.distances, query, -key])
    tilted = cells.split(torch.addcmul(solution, slope, line))
    means = [_mean(x, n) for x, n in zip(tilted, numbers, strict=True)]
    # A distance, query or key without cells has no coefficient: it is given as 0.
    parts = ((x - m) * (n > 0) for x, m, n in zip(tilted, means, numbers, strict=True))
    return (means[0] + means[1] + means[2])[..., 0], Parts(*parts)


def _mean(x: Tensor, weights: Tensor) -> Tensor:
    return (x * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
