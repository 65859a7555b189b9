"""Attention patterns in masks, and what fits of attention compare."""

from __future__ import annotations

import torch
from torch import Tensor

from tl_posdisent.additive.cells import cell_distances


def pattern_of(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)


def mixed(pattern: Tensor, mask: Tensor, part: float) -> Tensor:
    """With a pseudo-count."""
    n = mask.sum(-1, keepdim=True).clamp_min(1)
    return (1 - part) * pattern + part * mask / n


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL of each row, cell by cell."""
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)


def marginals(pattern: Tensor, low: int, high: int) -> list[Tensor]:
    """Total attention of every distance, and of every key, by masks."""
    d = cell_distances(*pattern.shape[-2:])
    return [torch.stack([(pattern * (d == x)).sum((-2, -1)) for x in range(low, high + 1)], -1), pattern.sum(-2)]
