"""All edits of one head's rotation, composed: which vectors and distances give its scores.

Under its edits, a head scores query i and key j by

    scale · Σ_c Re(q_ic · conj(k_jc) · exp(i (θ_c · D[i, j] / s + ε_ic - ε_jc))) + the part RoPE does not rotate

where D are distances from at most one position or distance edit, none larger than any ceiling, s is the product of
interpolation factors, ε the sum of all phase noise, θ_c = 0 if a frequency is frozen, and no term c if one is dropped.
A rotated query or key of another run replaces its whole factor, ``q_ic · exp(i (θ_c · u_i / s + ε_ic))`` at position u,
or that of the key: no other edit changes it, except that dropped terms are removed from it too. The order in which the
edits are given makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.hooks.edits.rotation_edits import (
    DistanceCeiling,
    DistanceMap,
    FrequencyLimit,
    PhaseNoise,
    PositionMap,
    PositionScale,
    RotationEdit,
    Side,
    VectorPatch,
)
from tl_posdisent.rope.rotary import Rotary, turn
from tl_posdisent.utils.errors import ArgumentError


@dataclass(frozen=True)
class HeadRotation:
    """All edits of one head's rotation."""

    edits: tuple[RotationEdit, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.edits)

    @cached_property
    def position(self) -> PositionMap | None:
        return next((edit for edit in self.edits if isinstance(edit, PositionMap)), None)

    @cached_property
    def distance(self) -> DistanceMap | None:
        return next((edit for edit in self.edits if isinstance(edit, DistanceMap)), None)

    @cached_property
    def ceiling(self) -> float:
        return min((edit.most for edit in self.edits if isinstance(edit, DistanceCeiling)), default=math.inf)

    @property
    def pairwise(self) -> bool:
        """Whether distances are not those of positions."""
        return self.distance is not None or self.ceiling < math.inf

    @property
    def distances_alone(self) -> bool:
        """Whether nothing but distances is edited, so that scores stay as they are where distances do."""
        return all(isinstance(edit, (DistanceMap, DistanceCeiling)) for edit in self.edits)

    @cached_property
    def scale(self) -> float:
        return math.prod(sorted(edit.factor for edit in self.edits if isinstance(edit, PositionScale)), start=1.0)

    def removed(self, mode: str, rotary: Rotary) -> Bool[Tensor, " subspace"] | None:
        """Find the subspaces that are dropped (``mode="drop"``) or frozen, or return None if nothing is."""
        limits = [x.removed(rotary) for x in self.edits if isinstance(x, FrequencyLimit) and x.mode == mode]
        return torch.stack(limits).any(0) if limits else None

    def patch(self, which: Side) -> Tensor | None:
        """Return the rotated queries or keys of another run, or None."""
        given = [getattr(x, f"{which}_rot") for x in self.edits if isinstance(x, VectorPatch)]
        return next((x for x in given if x is not None), None)

    # --- the composed rotation

    def positions(self, running: Tensor, texts: int) -> Tensor:
        """Return the positions to which queries and keys at the positions ``running`` are turned, before scaling."""
        return running if self.position is None else self.position.new(running, texts)

    def phases(self, rotary: Rotary, running: Tensor, texts: int) -> Tensor | float:
        """Sum all phase noise in the fixed order of ``edits`` (the float64 sum of two terms does not depend on it)."""
        noise = [edit for edit in self.edits if isinstance(edit, PhaseNoise)]
        return sum((edit.phases(rotary, running, texts) for edit in noise), 0.0)

    def frequencies(self, rotary: Rotary) -> Rotary:
        """Return the rotation that applies to distances: frequencies frozen and divided by the scale, angles exact."""
        frequencies, frozen = rotary.frequencies / self.scale, self.removed("freeze", rotary)
        if frozen is not None:
            frequencies = frequencies.masked_fill(frozen.to(frequencies.device), 0.0)
        return replace(rotary, frequencies=frequencies, angle_dtype=torch.float64)

    def angles(self, rotary: Rotary, positions: Tensor) -> Float64[Tensor, "*batch pos subspace"]:
        """Compute the angles at positions as the model would, without noise."""
        angles = rotary.angles(positions if self.scale == 1.0 else positions.double() / self.scale)
        frozen = self.removed("freeze", rotary)
        return angles if frozen is None else angles.masked_fill(frozen.to(angles.device), 0.0)

    def turned(
        self, x: Float[Tensor, "batch pos head d_head"], angles: Tensor, running: Tensor, rotary: Rotary
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Turn unrotated vectors by these angles and the noise of their positions."""
        angles = angles + self.phases(rotary, running, len(x))
        return turn(x, angles[..., None, :], rotary.pairing, rotary.attention_factor)

    def kept(self, q: Float[Tensor, "batch pos head d_head"], rotary: Rotary) -> Tensor:
        """Zero the dropped coordinates of queries: a term vanishes when its query is 0."""
        dropped = self.removed("drop", rotary)
        if dropped is not None:
            q = q.masked_fill(coordinates(rotary, dropped, q), 0)
        if any(isinstance(edit, FrequencyLimit) and edit.without_rest for edit in self.edits):
            q = q.masked_fill(~coordinates(rotary, rotary.frequencies != 0, q), 0)
        return q


def compose(edits: Sequence[RotationEdit]) -> HeadRotation:
    """Compose the edits of one head in an order that does not depend on the order given."""
    return HeadRotation(tuple(sorted(edits, key=lambda edit: (type(edit).__name__, edit.call))))


def coordinates(rotary: Rotary, subspaces: Bool[Tensor, " subspace"], x: Tensor) -> Bool[Tensor, " d_head"]:
    """Return a mask of the coordinates of ``x`` that make up these subspaces."""
    twice = torch.cat([subspaces, subspaces]) if rotary.pairing == "half" else subspaces.repeat_interleave(2)
    return torch.nn.functional.pad(twice, (0, x.shape[-1] - len(twice))).to(x.device)


def check_patch(name: str, given: Tensor, running: Tensor) -> None:
    """Refuse patched vectors whose shape differs from the run's own; ``running`` are those of some heads."""
    wanted = (*running.shape[:2], given.shape[2], running.shape[3])
    if given.shape != wanted:
        raise ArgumentError(name, f"must have the shape of the run's own, {wanted}, got {tuple(given.shape)}")
