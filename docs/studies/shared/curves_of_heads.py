"""How far two curves or two components of each head agree."""

from __future__ import annotations

import torch
from torch import Tensor


def shifts(means: Tensor, component: Tensor) -> dict[str, Tensor]:
    """By range of distances, from 1 (0 is a token with itself) up to half of the text: how the mean score at a distance
    follows the distance component, up to a straight line, which the fit cannot tell from the other components: its
    correlation and slope, and that with another head's."""
    columns, half = {}, means.shape[1] // 2
    near = min(16, half - 3)
    for name, start, stop in (("", 1, half), (" below 16", 1, near), (" from 16 on", near, half)):
        a, b = (without_line(x[:, start:stop]) for x in (means, component))
        weights = torch.ones(stop - start)
        what = f"mean score at a distance and distance component, distances{name}"
        columns[f"{what}, correlation"] = correlation(a, b, weights)
        columns[f"{what}, slope"] = (a * b).sum(-1) / (b * b).sum(-1)
        columns[f"{what}, correlation with another head's"] = correlation(a, b.roll(1, 0), weights)
    return columns


def without_line(x: Tensor) -> Tensor:
    """``[head, distance]`` minus each head's straight line of least squares."""
    line = torch.stack([torch.ones(x.shape[1]), torch.arange(x.shape[1])], 1).to(x)
    return x - (line @ torch.linalg.lstsq(line, x.T).solution).T


def correlation(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """``[head]``: weighted correlations over the last axis."""
    x, y = (v - (v * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True) for v in (x, y))
    return (weights * x * y).sum(-1) / ((weights * x * x).sum(-1) * (weights * y * y).sum(-1)).sqrt()
