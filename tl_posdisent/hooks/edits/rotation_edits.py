"""Edits of a head's rotation as values: positions, distances, frequencies, phases, vectors.

``head_edits.py`` composes those of one head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.hooks.edits.edit import Edit
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import shown

Side = Literal["q", "k"]

_NOISE_BLOCK = 64  # positions drawn at a time, so that those of a longer text begin with those of a shorter one


@dataclass(frozen=True, eq=False)
class RotationEdit(Edit):
    @property
    def by_place(self) -> bool:
        """True if a token's rotation depends on where it is in the text: the same text, moved, would get other scores.

        False if scores depend on distances alone, as after a map of distances, or positions that are given as numbers.
        """
        return False


@dataclass(frozen=True, eq=False)
class PositionMap(RotationEdit):
    """New positions: one for each slot of the batch, or a function of the tokens' own positions."""

    positions: Float[Tensor, "*batch pos"] | Callable[[Tensor], Tensor]

    @property
    def by_place(self) -> bool:
        return callable(self.positions)

    def new(self, positions: Tensor, texts: int) -> Tensor:
        """Return the new positions of tokens at ``positions``, ``(pos,)``: ``(pos,)`` or ``(batch, pos)``."""
        if not isinstance(self.positions, Tensor):
            return mapped(self.positions, positions.double(), "positions", "positions").to(positions.device)
        if self.positions.shape[-1] != positions.shape[-1]:
            raise ArgumentError(
                "positions",
                f"were given for {self.positions.shape[-1]} tokens, and the model runs on {positions.shape[-1]} (at "
                "once): give a function of the position for texts of any length",
            )
        if self.positions.ndim == 2 and len(self.positions) not in (1, texts):
            raise ArgumentError(
                "positions", f"were given for {len(self.positions)} texts, and the model runs on {texts}"
            )
        return self.positions.to(positions.device)


@dataclass(frozen=True, eq=False)
class DistanceMap(RotationEdit):
    """New distances, which need not be differences of positions: a matrix over slots, a function, or one number."""

    distances: Float[Tensor, "*lead query key"] | Callable[[Tensor], Tensor] | float


@dataclass(frozen=True, eq=False)
class DistanceCeiling(RotationEdit):
    """No distance exceeds this one, whichever edit sets the distances."""

    most: float


@dataclass(frozen=True, eq=False)
class PositionScale(RotationEdit):
    """Interpolation: all distances are divided by a factor."""

    factor: float


@dataclass(frozen=True, eq=False)
class FrequencyLimit(RotationEdit):
    """A band of frequencies: subspaces outside (or ``inside``) are removed (``"drop"``) or not rotated (``"freeze"``).

    With ``without_rest``, what the layer does not rotate is removed, too.
    """

    low: float
    high: float
    mode: Literal["drop", "freeze"]
    without_rest: bool = False
    inside: bool = False

    def removed(self, rotary: Rotary) -> Bool[Tensor, " subspace"]:
        """Find the rotating subspaces that are removed or no longer rotated."""
        band = within_band(rotary, self.low, self.high)
        return (band if self.inside else ~band) & (rotary.frequencies != 0)


@dataclass(frozen=True, eq=False)
class PhaseNoise(RotationEdit):
    """Angles in radians added at each position, the same for queries and keys.

    Given as ``(pos, subspace)`` or ``(batch, pos, subspace)``, as a function from a layer's rotary to such angles, or
    as the standard deviation with which they are drawn.
    """

    angles: Float[Tensor, "*batch pos subspace"] | Callable[[Rotary], Tensor] | float
    seed: int = 0

    @property
    def by_place(self) -> bool:
        return isinstance(self.angles, (int, float))

    def phases(self, rotary: Rotary, positions: Tensor, texts: int) -> Float[Tensor, "*batch pos subspace"]:
        """Return the angles of tokens at these positions."""
        n = len(rotary.frequencies)
        if isinstance(self.angles, (int, float)):
            generator = torch.Generator().manual_seed(self.seed)  # reseeded: all runs and layers get the same angles
            blocks = range(int(positions.max()) // _NOISE_BLOCK + 1)
            shape: Any = (_NOISE_BLOCK, n)
            drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in blocks]
            return self.angles * torch.cat(drawn).to(positions.device)[positions]
        angles = self.angles if isinstance(self.angles, Tensor) else self.angles(rotary)
        shape = positions.shape[-1], n
        if angles.shape[-2:] != shape or (angles.ndim == 3 and len(angles) not in (1, texts)):
            raise ArgumentError(
                "noise",
                f"must have shape (pos, subspace) = {shape} or (batch, pos, subspace) = {(texts, *shape)}, got "
                f"{tuple(angles.shape)}",
            )
        return angles.to(positions.device)


@dataclass(frozen=True, eq=False)
class VectorPatch(RotationEdit):
    """Rotated queries or keys of another run, put in after all other edits except dropped subspaces."""

    q_rot: Float[Tensor, "batch pos head d_head"] | None
    k_rot: Float[Tensor, "batch pos kv d_head"] | None


_ROUNDING = 1e-6  # relative: models keep frequencies in float32


def within_band(rotary: Rotary, low: float, high: float) -> Bool[Tensor, " subspace"]:
    """Find the subspaces whose frequency lies in the band, both ends included, up to the rounding of frequencies."""
    size, known = rotary.frequencies.abs(), torch.finfo(rotary.frequency_dtype)
    relative, absolute = max(_ROUNDING, known.eps), known.eps * known.smallest_normal  # float16 has no slower ones

    def near(end: float) -> float:
        return relative * end + absolute if end else 0.0

    return (size >= low - near(low)) & (size <= high + near(high))


def mapped(function: Callable[[Tensor], Tensor], real: Tensor, name: str, what: str) -> Tensor:
    """Evaluate a user's function at real numbers and check its values."""
    try:
        values = function(real.clone())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            name,
            f"is called with a float64 tensor of {what} at once, and failed: {error}. Use tensor operations, "
            "such as d.clamp(max=16) for min(d, 16)",
        ) from error
    finite = isinstance(values, Tensor) and values.shape == real.shape and bool(values.double().isfinite().all())
    if not finite:
        same_shape = isinstance(values, Tensor) and values.shape == real.shape
        raise ArgumentError(
            name,
            f"must map a tensor of {what} to finite ones of the same shape ({tuple(real.shape)}), got "
            f"{'values that are not finite' if same_shape else shown(values)}",
        )
    return values.double()
