"""Tolerances for comparisons."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor


def mismatch(observed: Tensor, predicted: Tensor, dtype: torch.dtype | None = None, slack: float = 0.0) -> float:
    """Compute the largest error in units of rounding (of the observed or a coarser dtype, plus ``slack``)."""
    if observed.numel() == 0:
        return 0.0
    wide = torch.promote_types(torch.promote_types(observed.dtype, predicted.dtype), torch.float32)
    error = _largest(observed.to(wide) - predicted.to(wide))
    allowed = score_tolerance(observed.dtype, dtype) * _largest(observed).to(wide) + slack
    return float(torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=torch.inf))


def _largest(x: Tensor) -> Tensor:
    """Compute the largest absolute value, or NaN if there is one, in one pass without a copy."""
    least, most = x.aminmax()
    return torch.maximum(-least, most)


def apart(a: Any, b: Any, dtype: torch.dtype = torch.float32) -> Bool[Tensor, "..."]:
    """Say whether two measures of a model of this dtype, such as losses, differ by more than rounding.

    If not, or if one is NaN, a share of their difference is meaningless.
    """
    one, other = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return (one - other).abs() > max(1e-5, torch.finfo(dtype).eps / 8) * torch.maximum(one.abs(), other.abs())


def score_tolerance(*dtypes: torch.dtype | None) -> float:
    """Return the tolerance for recomputed scores, relative to the largest, for inputs of these dtypes."""
    known = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2}  # rotation tables are float32 at best
    return max(known.get(dtype, 6e-2) for dtype in dtypes if dtype)
