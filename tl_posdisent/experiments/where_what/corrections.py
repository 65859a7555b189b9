"""Estimates of heads corrected by others that were run: how large contributions are, and how far estimates are off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tl_posdisent.experiments.measuring.part_runs import Head

_BANDS: Final = 6
"""Parts of a model's depth: estimates are off alike in layers that are near, and otherwise in early and late ones."""


def bands(pairs: Sequence[Head], n_layers: int) -> Int[Tensor, " head"]:
    """Number the sixth of the model's layers in which each head is; of few layers, each is one."""
    n = min(_BANDS, n_layers)
    return torch.tensor([layer * n // n_layers for layer, _ in pairs])


def from_others(
    values: Float64[Tensor, " head"], band: Int[Tensor, " head"], known: Bool[Tensor, " head"]
) -> Float64[Tensor, " head"]:
    """Average a quantity of the known heads for each head: the means of the bands, those that are near more.

    Returns:
        The weighted mean of all bands that have a known head, the head's own with the weight 1, the next with 1/4, and
        so on; NaN if no head is known.
    """
    there = band[known].unique()
    if not len(there):
        return torch.full_like(values, torch.nan)
    means = torch.stack([values[known & (band == one)].mean() for one in there])
    weights = torch.exp2(-2.0 * (band[:, None] - there).abs().double())  # a quarter for each band between
    return (weights * means).sum(1) / weights.sum(1)


def log_ratios(estimated: Float64[Tensor, " head"], measured: Float64[Tensor, " head"]) -> Float64[Tensor, " head"]:
    """Return the logarithm of measured over estimated contributions; NaN where there is none."""
    return torch.where((estimated > 0) & (measured > 0), (measured / estimated).log(), torch.nan)


def spread_of_ratios(logs: Float64[Tensor, " head"], band: Int[Tensor, " head"]) -> Float64[Tensor, " head"]:
    """Compute the standard error of a corrected contribution, relative: how far each head that was run would be off,
    corrected by all others, as a root mean square over these heads (see ``from_others``)."""
    known, off = ~logs.isnan(), torch.full_like(logs, torch.nan)
    for n in known.nonzero()[:, 0].tolist():
        off[n] = logs[n] - from_others(logs, band, known & (torch.arange(len(logs)) != n))[n]
    return from_others(off.square(), band, ~off.isnan()).sqrt()
