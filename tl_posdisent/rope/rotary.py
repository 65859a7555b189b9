"""Rotary position embedding (RoPE): rotate vectors, read frequencies from a model's tables, compute tables.

RoPE splits the first ``2n`` coordinates of a query or key into n planes (*subspaces*) and rotates plane c by the angle
``position · θ_c``; further coordinates pass through. A score then depends on positions only through their difference:
``⟨R(p) q, R(s) k⟩ = Σ_c Re(q_c · conj(k_c) · exp(i θ_c (p − s))) + pass-through``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, nan
from typing import Any, Literal, get_args

import torch
from jaxtyping import Complex, Float, Float64, Real
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tensor_checks import check_floating, described
from tl_posdisent.utils.validation import check_choice, check_number, shown

Pairing = Literal["half", "adjacent"]


@dataclass(frozen=True)
class Rotary:
    """Rotary geometry of one layer: frequencies, pairing of coordinates, attention factor; equal if all of it is.

    Attributes:
        frequencies: ``[subspace]`` float64, θ_c in radians per position, exactly as the model has them; negative in a
            model that rotates the other way (nanochat).
        pairing: ``"half"`` pairs coordinate c with c + n (Llama, GPT-NeoX), ``"adjacent"`` 2c with 2c + 1 (GPT-J).
        attention_factor: factor of queries and keys when they are rotated (YaRN); scores get its square.
        angle_dtype: dtype to which angles are rounded, as models round ``position · θ`` (float32); float64 is exact.
        frequency_dtype: dtype to which frequencies are rounded, or of the table from which they were measured.

    Raises:
        ValueError: an attribute of another type, or that is not finite.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Rotary
        >>> rotary = Rotary(10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4))  # Llama's, for 8 coordinates
        >>> rotary.dim, rotary.wavelengths.round().tolist()
        (8, [6.0, 63.0, 628.0, 6283.0])
    """

    frequencies: Float64[Tensor, " subspace"]
    pairing: Pairing = "half"
    attention_factor: float = 1.0
    angle_dtype: torch.dtype = torch.float64
    frequency_dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        check_choice("pairing", self.pairing, get_args(Pairing))
        x = self.frequencies
        if not isinstance(x, Tensor) or x.ndim != 1 or x.dtype != torch.float64:
            raise ArgumentError("frequencies", f"must be a float64 tensor of shape (subspace,), got {described(x)}")
        if not bool(x.isfinite().all()):
            raise ArgumentError("frequencies", f"must be finite, got {int((~x.isfinite()).sum())} NaN or infinite")
        check_number("attention_factor", self.attention_factor, above=0)
        for name, dtype in (("angle_dtype", self.angle_dtype), ("frequency_dtype", self.frequency_dtype)):
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ArgumentError(name, f"must be a floating point torch.dtype, got {dtype!r}")

    def _contents(self) -> tuple[Any, ...]:
        factor, dtypes = self.attention_factor, (self.angle_dtype, self.frequency_dtype)
        return tuple(self.frequencies.tolist()), self.pairing, factor, dtypes

    def __eq__(self, other: object) -> bool:
        return self._contents() == other._contents() if isinstance(other, Rotary) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._contents())

    @property
    def dim(self) -> int:
        """Number of coordinates that are rotated: twice the number of subspaces."""
        return 2 * len(self.frequencies)

    @property
    def wavelengths(self) -> Float64[Tensor, " subspace"]:
        """Positions per full turn, 2π/|θ|; infinite for frequency 0."""
        return 2 * torch.pi / self.frequencies.abs()

    @property
    def base(self) -> float:
        """The base of ``θ_c = base ** (-c / number of subspaces)``; NaN for frequencies that are not of this form.

        >>> rotary = Rotary(10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4), "half")
        >>> round(rotary.base), Rotary(torch.tensor([1.0, 0.5, 0.4], dtype=torch.float64), "half").base
        (10000, nan)
        """
        n = len(self.frequencies)
        if n < 2 or not bool((self.frequencies > 0).all()):
            return nan
        logs = self.frequencies.log()
        slope = float(logs[-1] - logs[0]) / (n - 1)
        fits = (logs - slope * torch.arange(n, device=logs.device)).abs().max() < 1e-3 * abs(slope)
        return exp(-n * slope) if bool(fits) else nan

    def angles(self, positions: Real[Tensor, "*pos"]) -> Float64[Tensor, "*pos subspace"]:
        """Compute the angle of every subspace at these positions, in radians, rounded as the model rounds it."""
        exact = positions.double()[..., None] * self.frequencies.to(positions.device)
        return exact.to(self.angle_dtype).double()

    def to(self, device: torch.device | str) -> Rotary:
        """Return the same rotation on another device."""
        return replace(self, frequencies=self.frequencies.to(device))


def rotate(
    x: Float[Tensor, "*batch pos head d_head"], positions: Tensor, rotary: Rotary
) -> Float[Tensor, "*batch pos head d_head"]:
    """Rotate queries or keys to ``positions``.

    Args:
        x: vectors before rotation, ``[*batch, pos, head, d_head]``; coordinates beyond ``rotary.dim`` pass through.
        positions: ``(pos,)`` for all texts or ``(batch, pos)``: any finite real numbers.
        rotary: the layer's rotation.

    Returns:
        A tensor of the shape and dtype of ``x``; computed in float64 for float64 and in float32 otherwise.

    Raises:
        ValueError: a head smaller than the rotary dimension; positions of wrong shape or not finite.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Rotary, rotate
        >>> rotary = Rotary(torch.tensor([torch.pi / 2], dtype=torch.float64))  # a quarter turn per position
        >>> x = torch.tensor([1.0, 0.0]).expand(3, 1, 2)  # three positions, one head
        >>> rotate(x, torch.arange(3), rotary).round().tolist()
        [[[1.0, 0.0]], [[0.0, 1.0]], [[-1.0, 0.0]]]
    """
    _check(x, rotary)
    angle = rotary.angles(_check_positions(positions, x))
    return turn(x, angle[..., None, :], rotary.pairing, rotary.attention_factor)


def turn(
    x: Float[Tensor, "*batch d_head"], angle: Float64[Tensor, "*angle subspace"], pairing: Pairing, factor: float
) -> Float[Tensor, "*batch d_head"]:
    """Rotate each subspace of ``x`` by its angle and multiply it by ``factor``; further coordinates pass through."""
    n = angle.shape[-1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (factor * angle.cos()).to(dtype), (factor * angle.sin()).to(dtype)
    first, second = (part.to(dtype) for part in _planes(x[..., : 2 * n], pairing))
    turned = _joined(first * cos - second * sin, first * sin + second * cos, pairing).to(x.dtype)
    return turned if x.shape[-1] == 2 * n else torch.cat([turned, x[..., 2 * n :]], -1)


def to_complex(
    x: Float[Tensor, "*batch d_head"], rotary: Rotary
) -> tuple[Complex[Tensor, "*batch subspace"], Float[Tensor, "*batch rest"]]:
    """Split vectors into subspaces as complex numbers, and the coordinates that RoPE does not rotate.

    Rotation to position p is then multiplication by ``exp(i θ p)``. Complex numbers are complex128 for float64 and
    complex64 otherwise.

    Raises:
        ValueError: vectors smaller than the rotary dimension, or with an integer dtype.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Rotary, to_complex
        >>> rotary = Rotary(torch.tensor([1.0, 0.01], dtype=torch.float64))
        >>> z, rest = to_complex(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), rotary)
        >>> z.tolist(), rest.tolist()
        ([(1+3j), (2+4j)], [5.0])
    """
    _check(x, rotary)
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    first, second = _planes(x[..., : rotary.dim], rotary.pairing)
    return torch.complex(first.contiguous(), second.contiguous()), x[..., rotary.dim :]


def from_complex(
    z: Complex[Tensor, "*batch subspace"], rest: Float[Tensor, "*batch rest"], rotary: Rotary
) -> Float[Tensor, "*batch d_head"]:
    """Undo ``to_complex``: join subspaces and the other coordinates into vectors."""
    return torch.cat([_joined(z.real, z.imag, rotary.pairing), rest], -1)


def _check_positions(positions: Tensor, x: Tensor) -> Tensor:
    """Validate ``positions`` and return them on the device of ``x: [*batch, pos, head, d_head]``."""
    if x.ndim < 3:
        raise ArgumentError("x", f"must have shape (*batch, pos, head, d_head), got {tuple(x.shape)}")
    length = x.shape[-3]
    if not isinstance(positions, Tensor) or not (
        positions.shape == (length,)
        or (x.ndim == 4 and positions.shape[1:] == (length,) and len(positions) in (1, len(x)))
    ):
        batch = x.shape[0] if x.ndim == 4 else "batch"
        raise ArgumentError(
            "positions",
            f"must have shape (pos,) = ({length},) or (batch, pos) = ({batch}, {length}), got {described(positions)}",
        )
    if positions.dtype == torch.bool or positions.is_complex() or not bool(positions.isfinite().all()):
        raise ArgumentError("positions", f"must be finite real numbers, got {shown(positions)}")
    return positions.to(x.device)


def check_rotary(rotary: Any) -> Rotary:
    """Return ``rotary``, or raise unless it is a ``Rotary``."""
    if not isinstance(rotary, Rotary):
        raise ArgumentError("rotary", f"must be a Rotary, got {type(rotary).__name__}")
    return rotary


def _check(x: Any, rotary: Rotary) -> None:
    check_rotary(rotary)
    if not isinstance(x, Tensor) or x.ndim < 1 or not x.is_floating_point() or x.shape[-1] < rotary.dim:
        raise ArgumentError(
            "x",
            f"must be floating point with a last axis of at least {rotary.dim} (two per frequency), got {described(x)}",
        )


def _planes(x: Tensor, pairing: Pairing) -> tuple[Tensor, ...]:
    return x.tensor_split(2, -1) if pairing == "half" else (x[..., ::2], x[..., 1::2])


def _joined(first: Tensor, second: Tensor, pairing: Pairing) -> Tensor:
    return torch.cat([first, second], -1) if pairing == "half" else torch.stack([first, second], -1).flatten(-2)


def rotary_from_table(
    cos: Float[Tensor, "pos columns"], sin: Float[Tensor, "pos columns"], *, pairing: Pairing = "half"
) -> Rotary:
    """Read frequencies and attention factor from a model's table of cosines and sines for positions 0, 1, 2 ….

    The table may have one column per subspace, or two of them in either order (``c0 c1 c0 c1`` or ``c0 c0 c1 c1``).
    Row 1 gives each angle up to the rounding of the table; each doubling of the position halves that error, and the
    estimate so far determines the number of full turns. Angles of the result are rounded to float32. ``pairing`` is
    only copied to the result, because a table does not show it.

    Raises:
        ValueError: fewer than two rows, or angles that do not grow linearly with the row.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import rotary_from_table
        >>> angle = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.1])
        >>> rotary_from_table(1.5 * angle.cos(), 1.5 * angle.sin()).frequencies.tolist()
        [1.0..., 0.1...]
    """
    for name, x in (("cos", cos), ("sin", sin)):
        check_floating(name, x)
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] < 2:
        raise ValueError(
            "cos and sin must have the same shape (pos, columns) with at least two positions, got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    dtype = cos.dtype
    cos, sin = (_one_column_each(x.double()) for x in (cos, sin))
    radius = torch.hypot(cos, sin)
    measured = torch.atan2(sin, cos)
    theta, position = measured[1].clone(), 2
    while position < cos.shape[0]:
        theta = theta + _wrapped(measured[position] - theta * position) / position
        position *= 2
    error = _wrapped(measured - torch.arange(len(cos), device=cos.device)[:, None].double() * theta).abs()
    if cos.shape[1] and not (float(error.max()) < 0.05 and float((radius / radius.mean() - 1).abs().max()) < 0.05):
        raise ValueError("cos and sin are not a rotary table: its angles do not grow linearly with the position")
    factor = float(radius.mean()) if radius.numel() else 1.0
    factor = 1.0 if abs(factor - 1) < 1e-2 * torch.finfo(torch.bfloat16).eps else factor
    return Rotary(theta, pairing, factor, angle_dtype=torch.float32, frequency_dtype=dtype)


def _one_column_each(table: Float64[Tensor, "*pos columns"]) -> Float64[Tensor, "*pos subspace"]:
    """Drop the second column of each subspace, if the table has two."""
    if table.shape[-1] % 2 == 0:
        for one, other in (_planes(table, "half"), _planes(table, "adjacent")):
            if torch.equal(one, other):
                return one
    return table


def _wrapped(angle: Tensor) -> Tensor:
    return torch.remainder(angle + torch.pi, 2 * torch.pi) - torch.pi
