"""Estimates of heads corrected by others that were run: how large contributions are, and how far estimates are off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tl_posdisent.experiments.measuring.part_runs import Head


@dataclass(frozen=True, eq=False)
class Correction:
    """What runs of some heads show about the estimates of others.

    Attributes:
        factors: by which the estimated contribution of each head is multiplied: the geometric mean over the heads of
            its layer that were run, and one more with the mean of all that were run; 1 where none was.
        spread: standard deviation of the logarithm of measured over corrected contribution, of a head that was not
            used to correct it; NaN for fewer than two runs.
        ratios: measured over estimated contribution of the heads that were run, NaN of others.
    """

    factors: Float64[Tensor, " head"]
    spread: float
    ratios: Float64[Tensor, " head"]


def correction(
    pairs: Sequence[Head], estimated: Float64[Tensor, " head"], measured: Float64[Tensor, " head"]
) -> Correction:
    """Compare the contributions of heads that were run with their estimates.

    Args:
        measured: NaN of heads that were not run.
    """
    ratios = torch.where((estimated > 0) & (measured > 0), measured / estimated, torch.nan)
    logs, layers = ratios.log(), torch.tensor([layer for layer, _ in pairs])
    known = ~logs.isnan()
    if not known.any():
        return Correction(torch.ones_like(ratios), nan, ratios)
    factors = torch.stack([_of_layer(logs, layers, known, layer) for layer in layers.tolist()])
    off = [
        logs[n] - _of_layer(logs, layers, known & (torch.arange(len(pairs)) != n), layers[n])
        for n in known.nonzero()[:, 0].tolist()
    ]
    spread = torch.stack(off).square().mean().sqrt().item() if len(off) > 1 else nan
    return Correction(factors.exp(), spread, ratios)


def _of_layer(logs: Tensor, layers: Tensor, known: Bool[Tensor, " head"], layer: Any) -> Float64[Tensor, ""]:
    """Average over the known heads of a layer, and one more head that has the mean of all known ones."""
    of_layer = logs[known & (layers == layer)]
    return torch.cat([of_layer, logs[known].mean()[None]]).mean()


def estimation_errors(
    estimated: Mapping[str, Float64[Tensor, " head"]], measured: Mapping[str, Float64[Tensor, " head"]]
) -> dict[str, float]:
    """Compute how far estimates of heads that were run are off, as a root mean square; NaN for fewer than two heads."""
    errors = {}
    for name, values in estimated.items():
        off = (values - measured[name])[~measured[name].isnan() & ~values.isnan()]
        errors[name] = off.square().mean().sqrt().item() if len(off) > 1 else nan
    return errors
