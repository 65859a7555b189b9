"""Capacity of RoPE: the best approximation of a function of the distance with a layer's frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import own_sums
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import Numbers, check_flag, check_number, real_numbers

from .rotary import Rotary, check_rotary


@dataclass(frozen=True, eq=False, repr=False)
class RopeCapacity(HasTable):
    """The best approximation of a function of the distance with a layer's frequencies.

    All tensors are float64 (the coefficients complex128); values are in the units of the target.

    Attributes:
        distances: ``[distance]``, in tokens.
        target: ``[distance]``, the function to approximate.
        fitted: ``[distance]``, ``intercept + Σ_c Re(z_c · exp(i θ_c d))``.
        coefficients: ``[subspace]``, the z_c: the product ``q_c · conj(k_c)`` of a query and a key with this profile,
            times the model's scale and the square of its attention factor.
        intercept: a constant, which the softmax ignores; 0 without ``intercept=True``.
        condition: largest over smallest singular value of the basis; infinite with fewer distances than real
            coefficients. If it is large, coefficients without a ridge are large and cancel each other.
        frequencies: ``[subspace]``, θ in radians per position.
    """

    distances: Float64[Tensor, " distance"]
    target: Float64[Tensor, " distance"]
    fitted: Float64[Tensor, " distance"]
    coefficients: Complex128[Tensor, " subspace"]
    intercept: float
    condition: float
    frequencies: Float64[Tensor, " subspace"]

    @property
    def error(self) -> float:
        """Mean square of ``target - fitted``, divided by the target's variance; NaN for a constant target."""
        variance = self.target.var(correction=0).item()
        # A constant's variance can be above 0 by rounding of the mean.
        varies = variance > 1e-28 * self.target.square().mean().item()
        return (self.target - self.fitted).square().mean().item() / variance if varies else math.nan

    @property
    def r2(self) -> float:
        """``1 - error``; without intercept it can be negative."""
        return 1 - self.error

    @property
    def norm(self) -> float:
        """``√Σ|z_c|²``: size of the products of queries and keys that the profile needs; a model's vectors limit it."""
        return self.coefficients.abs().square().sum().sqrt().item()

    def to_frame(self) -> pd.DataFrame:
        """Return one row per distance: ``distance``, ``target``, ``fitted``."""
        return pd.DataFrame({name: getattr(self, name).tolist() for name in ("distances", "target", "fitted")}).rename(
            columns={"distances": "distance"}
        )

    def __repr__(self) -> str:
        return (
            f"RopeCapacity of {len(self.frequencies)} frequencies for {len(self.distances)} distances: "
            f"r² {self.r2:.4g}, norm {self.norm:.3g}, condition {self.condition:.3g}"
        )


@own_sums()
def rope_capacity(
    rotary: Rotary, distances: Numbers, target: Numbers, *, ridge: float = 0.0, intercept: bool = False
) -> RopeCapacity:
    """Approximate a function of the distance with a layer's rotary frequencies, as well as any query and key could.

    The fit is regularised least squares, in float64 by singular values:

        mean over d of ( Σ_c Re(z_c · exp(i θ_c d)) - target(d) )²  +  ridge · Σ_c |z_c|²   →   min.

    A query and a key can have any z_c, so the result is the best that RoPE can do (an inverse Fourier transform,
    arXiv 2503.13305). Of all coefficients that fit equally well over these distances, the smallest are chosen.
    Returns ``RopeCapacity``.

    Args:
        rotary: the layer's frequencies; angles are rounded as its model rounds them.
        distances: query position minus key position, 1-D, any finite numbers.
        target: the function's value at each distance.
        ridge: weight of ``Σ|z_c|²``, in (units of the target / units of z)², not negative.
        intercept: whether to fit also a constant, without penalty. The softmax ignores constants.

    Raises:
        ValueError: distances or a target that are not finite, empty, or of unequal length; a negative ridge; a rotary
            without frequencies.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Rotary, rope_capacity
        >>> rotary = Rotary(10000.0 ** -(torch.arange(64, dtype=torch.float64) / 64))  # as in Llama 2
        >>> near = [float(d < 10) for d in range(256)]  # a window with a sharp edge
        >>> free, cheap = rope_capacity(rotary, range(256), near), rope_capacity(rotary, range(256), near, ridge=1e-2)
        >>> bool(free.r2 > 0.95), bool(free.r2 > cheap.r2 > 0.5), bool(cheap.norm < 1 < free.norm)
        (True, True, True)
    """
    device = check_rotary(rotary).frequencies.device
    d, y = real_numbers("distances", distances, device), real_numbers("target", target, device)
    if d.shape != y.shape:
        raise ArgumentError("target", f"must have one value per distance, got {len(y)} values for {len(d)} distances")
    ridge = check_number("ridge", ridge, least=0)
    check_flag("intercept", intercept)
    if len(rotary.frequencies) == 0:
        raise ArgumentError("rotary", "must have at least one frequency, got none")
    angle = rotary.angles(d)
    basis = torch.cat([angle.cos(), -angle.sin()], -1)
    centre, level = (basis.mean(0), y.mean()) if intercept else (torch.zeros_like(basis[0]), torch.zeros_like(y[0]))
    u, s, v = torch.linalg.svd((basis - centre) / math.sqrt(len(d)), full_matrices=False)
    kept = s > torch.finfo(s.dtype).eps * max(basis.shape) * s[0]
    inverse = torch.where(kept, s / (s**2 + ridge), 0.0)
    along = u.mT @ (y - level)
    x = v.mT @ (inverse * along) / math.sqrt(len(d))
    constant = level - centre @ x
    smallest = s[-1].item() if basis.shape[1] <= len(d) else 0.0
    return RopeCapacity(
        distances=d,
        target=y,
        fitted=u @ (s * inverse * along) + level,  # as a projection: from large coefficients it would lose digits
        coefficients=torch.complex(*x.chunk(2)),
        intercept=constant.item(),
        condition=s[0].item() / smallest if smallest > 0 else math.inf,
        frequencies=rotary.frequencies,
    )
