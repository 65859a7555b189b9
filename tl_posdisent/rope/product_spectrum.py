"""The singular spectrum of ``q kᵀ``, its condition number and its effective rank."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor


def product_spectrum(
    q: Float[Tensor, "*batch query d"], k: Float[Tensor, "*batch key d"]
) -> Float64[Tensor, "*batch rank"]:
    """Compute the singular values of ``q kᵀ`` in descending order, without forming the product; omitted ones are 0."""
    triangles = [torch.linalg.qr(x.double(), mode="r").R for x in (q, k)]
    spectrum: Tensor = torch.linalg.svdvals(triangles[0] @ triangles[1].mT)
    return spectrum


def condition_number(spectrum: Float64[Tensor, "*batch rank"]) -> Float64[Tensor, "*batch"]:
    """Divide the largest singular value by the smallest; infinite if the smallest is 0 up to rounding."""
    largest, smallest = spectrum[..., 0], spectrum[..., -1]
    zero = smallest <= largest * torch.finfo(torch.float64).eps * spectrum.shape[-1]
    return torch.where(zero, torch.inf, largest / smallest)


def effective_rank(spectrum: Float64[Tensor, "*batch rank"]) -> Float64[Tensor, "*batch"]:
    """Compute ``exp`` of the entropy of the singular values, normalised to sum 1; NaN if all are 0."""
    p = spectrum / spectrum.sum(-1, keepdim=True)
    rank: Tensor = torch.special.entr(p).sum(-1).exp()
    return rank
