"""Edits of a head's rotation (positions, frequencies, phases, vectors), and how several compose.

Under edits of its rotation, a head scores query i and key j by

    scale · Σ_c Re(q_ic · conj(k_jc) · exp(i (θ_c · (u_i - w_j) / s + ε_ic - ε_jc))) + the part RoPE does not rotate

with positions u and w (or any distances in place of u - w) from at most one position intervention, s the product of
interpolation factors, ε the sum of all phase noise, θ_c = 0 if a frequency is frozen, and no term c if one is dropped.
A rotated query or key of another run replaces its whole factor, ``q_ic · exp(i (θ_c · u_i / s + ε_ic))`` or that of the
key: no other edit changes it, except that dropped terms are removed from it too. The order in which the edits are given
makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.hooks.edits.edit import Edit
from tl_posdisent.rope.rotary import Rotary, in_columns_of, table_like, turn
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import shown

Side = Literal["q", "k"]

NewPositions = Tensor | Callable[[Tensor], Tensor] | float | int
"""One position for all tokens; one for each slot of the batch, ``(pos,)`` or ``(batch, pos)``; or a function of the
tokens' own positions."""

_NOISE_BLOCK = 64  # positions drawn at a time, so that those of a longer text begin with those of a shorter one


@dataclass(frozen=True, eq=False)
class RotationEdit(Edit):
    # What to give for parts of a text instead of values per slot; None if values per slot serve parts too.
    by_position: ClassVar[str | None] = "a function of the position"

    @property
    def slots(self) -> bool:
        """Whether it was given for each slot of the batch, regardless of the tokens' own positions."""
        return False

    @property
    def by_place(self) -> bool:
        """Whether it depends on the tokens' own positions, not only on the distances between them."""
        return False

    def same_from(self, own: Tensor, start: int, rotary: Rotary) -> bool:
        """Say whether it does the same to tokens at these positions if their text starts at ``start`` instead of 0."""
        return True


@dataclass(frozen=True, eq=False)
class PositionMap(RotationEdit):
    """New positions: the distance of query i and key j becomes ``queries[i] - keys[j]``."""

    queries: NewPositions
    keys: NewPositions
    unscaled: int | None = None  # the model scales scores by the positions of queries from this one on

    @property
    def slots(self) -> bool:
        return isinstance(self.queries, Tensor)

    @property
    def by_place(self) -> bool:
        return callable(self.queries)

    @property
    def distances_only(self) -> bool:
        """Whether only the differences of its positions are defined: one distance between all queries and keys."""
        return isinstance(self.queries, (int, float))

    def same_from(self, own: Tensor, start: int, rotary: Rotary) -> bool:
        if not callable(self.queries) or not own.numel():
            return True
        at_slots, in_text = (mapped(self.queries, x.double(), "positions", "positions") for x in (own, own - start))
        shift = in_text - at_slots  # the same for all tokens changes no distance
        size = torch.stack([at_slots, in_text]).abs().max()
        return bool(shift.max() - shift.min() <= 1e-9 * size)

    def places(self, which: Side, own: Tensor, texts: int) -> Tensor:
        """Return the new positions of tokens whose own are ``own``, ``(pos,)`` or ``(batch, pos)``."""
        found = self._places(self.queries if which == "q" else self.keys, own, texts)
        if self.unscaled is None:
            return found
        both = torch.stack([x.double() for x in torch.broadcast_tensors(found, own)])
        if torch.equal(*both) or bool(((both >= 0) & (both < self.unscaled)).all()):
            return found
        advice = "give a shorter text"
        if bool((own < self.unscaled).all()):  # longer texts are refused by remap_distance too
            advice = "give nearer positions, or use remap_distance, which changes distances alone"
        raise ArgumentError(
            "positions",
            f"must be from 0 to {self.unscaled - 1} for {self.tool}, of the text and as given, got "
            f"{both.min():g} … {both.max():g}: from {self.unscaled} on, this model scales scores by the position of "
            f"the query, which the hooks do not change; {advice}",
        )

    def _places(self, given: NewPositions, own: Tensor, texts: int) -> Tensor:
        if isinstance(given, Tensor):
            if given.shape[-1] != own.shape[-1]:
                raise ArgumentError(
                    "positions",
                    f"were given for {given.shape[-1]} tokens, and the model runs on {own.shape[-1]} (at "
                    "once): give a function of the position for texts of any length or with a KV cache",
                )
            if given.ndim == 2 and len(given) not in (1, texts):
                raise ArgumentError("positions", f"were given for {len(given)} texts, and the model runs on {texts}")
            return given.to(own.device)
        if callable(given):
            return mapped(given, own.double(), "positions", "positions").to(own.device)
        return torch.full(own.shape[-1:], float(given), dtype=torch.float64, device=own.device)


@dataclass(frozen=True, eq=False)
class DistanceMap(RotationEdit):
    """New distances, which need not be differences of positions: a matrix over slots, or a function."""

    distances: Float[Tensor, "*lead query key"] | Callable[[Tensor], Tensor]

    by_position = None
    distances_only: ClassVar[bool] = True

    @property
    def slots(self) -> bool:
        return isinstance(self.distances, Tensor)

    def values(self, low: int, high: int, device: torch.device) -> Float[Tensor, " distance"]:
        """Evaluate the function at the real distances ``low … high``."""
        assert callable(self.distances)
        real = torch.arange(low, max(high, low + 1) + 1, device=device).double()
        return mapped(self.distances, real, "distances", "real distances")


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

    def check(self, read: Rotary, running: Rotary, layer: int) -> None:
        """Refuse a text that is rotated by other frequencies if different subspaces then lie in the band."""
        if not torch.equal(self.removed(read).to(running.frequencies.device), self.removed(running)):
            raise ValueError(
                f"low and high of {self.tool} leave other subspaces in this text than in short ones: layer {layer} "
                "rotates long texts by other frequencies. Give a text within the model's original context"
            )


@dataclass(frozen=True, eq=False)
class PhaseNoise(RotationEdit):
    """Angles in radians added at each position, the same for queries and keys.

    Given as ``(pos, subspace)`` or ``(batch, pos, subspace)``, as a function from a layer's rotary to such angles, or
    as the standard deviation with which they are drawn.
    """

    angles: Float[Tensor, "*batch pos subspace"] | Callable[[Rotary], Tensor] | float
    seed: int = 0
    by_position = "a standard deviation"

    @property
    def slots(self) -> bool:
        return not isinstance(self.angles, (int, float))

    @property
    def by_place(self) -> bool:
        return not self.slots

    def same_from(self, own: Tensor, start: int, rotary: Rotary) -> bool:
        if not self.by_place or not own.numel():
            return True
        return torch.equal(self.phases(rotary, own, 1), self.phases(rotary, own - start, 1))

    def phases(self, rotary: Rotary, own: Tensor, texts: int) -> Float[Tensor, "*batch pos subspace"]:
        """Return the angles of tokens at their own positions."""
        n = len(rotary.frequencies)
        if isinstance(self.angles, (int, float)):
            generator = torch.Generator().manual_seed(self.seed)  # reseeded: all runs and layers get the same angles
            blocks = range(int(own.max()) // _NOISE_BLOCK + 1)
            shape: Any = (_NOISE_BLOCK, n)
            drawn = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for _ in blocks]
            return self.angles * torch.cat(drawn).to(own.device)[own]
        angles = self.angles if isinstance(self.angles, Tensor) else self.angles(rotary)
        shape = own.shape[-1], n
        if angles.shape[-2:] != shape or (angles.ndim == 3 and len(angles) not in (1, texts)):
            raise ArgumentError(
                "noise",
                f"must have shape (pos, subspace) = {shape} or (batch, pos, subspace) = {(texts, *shape)}, got "
                f"{tuple(angles.shape)}",
            )
        return angles.to(own.device)


@dataclass(frozen=True, eq=False)
class VectorPatch(RotationEdit):
    """Rotated queries or keys of another run, put in after all other edits except dropped subspaces."""

    q_rot: Float[Tensor, "batch pos head d_head"] | None
    k_rot: Float[Tensor, "batch pos kv d_head"] | None


@dataclass(frozen=True)
class HeadRotation:
    """All edits of one head's rotation, composed."""

    edits: tuple[RotationEdit, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.edits)

    @cached_property
    def position(self) -> PositionMap | DistanceMap | None:
        return next((edit for edit in self.edits if isinstance(edit, (PositionMap, DistanceMap))), None)

    @cached_property
    def scale(self) -> float:
        return math.prod(sorted(edit.factor for edit in self.edits if isinstance(edit, PositionScale)), start=1.0)

    @cached_property
    def noise(self) -> tuple[PhaseNoise, ...]:
        return tuple(edit for edit in self.edits if isinstance(edit, PhaseNoise))

    def removed(self, mode: str, rotary: Rotary) -> Bool[Tensor, " subspace"] | None:
        limits = [x.removed(rotary) for x in self.edits if isinstance(x, FrequencyLimit) and x.mode == mode]
        return torch.stack(limits).any(0) if limits else None

    def patch(self, which: Side) -> Tensor | None:
        """Return the rotated queries or keys of another run, or None."""
        given = [getattr(x, f"{which}_rot") for x in self.edits if isinstance(x, VectorPatch)]
        return next((x for x in given if x is not None), None)

    @cached_property
    def patched(self) -> bool:
        return any(isinstance(edit, VectorPatch) for edit in self.edits)

    @cached_property
    def of_positions(self) -> HeadRotation:
        """The edits that a changed rotation table can express: positions, interpolation, frozen frequencies."""
        kinds = (PositionMap, DistanceMap, PositionScale)
        return self._only(lambda e: isinstance(e, kinds) or (isinstance(e, FrequencyLimit) and e.mode == "freeze"))

    @cached_property
    def of_keys(self) -> HeadRotation:
        """The edits that change keys, which heads may share."""
        return self._only(
            lambda e: (
                not (isinstance(e, FrequencyLimit) and (e.mode == "drop" or e.without_rest))
                and not (isinstance(e, VectorPatch) and e.k_rot is None)
            )
        )

    def _only(self, wanted: Callable[[RotationEdit], bool]) -> HeadRotation:
        return HeadRotation(tuple(filter(wanted, self.edits)))

    @property
    def pairwise(self) -> bool:
        """Whether turning queries and keys cannot produce these distances."""
        return isinstance(self.position, DistanceMap)

    # --- the composed rotation

    def places(self, which: Side, own: Tensor, texts: int) -> Tensor:
        """Return the positions to which queries or keys are turned."""
        if isinstance(self.position, PositionMap):
            own = self.position.places(which, own, texts)
        return own if self.scale == 1.0 else own.double() / self.scale

    def angles(self, rotary: Rotary, places: Tensor) -> Tensor:
        """Compute the angles of all subspaces at these positions, without noise."""
        angles, frozen = rotary.angles(places), self.removed("freeze", rotary)
        return angles if frozen is None else angles.masked_fill(frozen.to(angles.device), 0.0)

    def phases(self, rotary: Rotary, own: Tensor, texts: int) -> Tensor | float:
        """Sum all phase noise in the fixed order of ``edits`` (the float64 sum of two terms does not depend on it)."""
        return sum((edit.phases(rotary, own, texts) for edit in self.noise), 0.0)

    def turned(self, x: Tensor, places: Tensor, own: Tensor, rotary: Rotary) -> Tensor:
        """Turn unrotated vectors to these positions, with the noise of their own positions."""
        angles = self.angles(rotary, places) + self.phases(rotary, own, len(x))
        return turn(x, angles[..., None, :], rotary.pairing, rotary.attention_factor)

    def kept(self, x: Float[Tensor, "batch pos head d_head"], rotary: Rotary, which: Side = "q") -> Tensor:
        """Zero the dropped subspaces of queries (a term vanishes when its query is 0); return keys unchanged."""
        if which == "k":
            return x
        dropped = self.removed("drop", rotary)
        if dropped is not None:
            x = x.masked_fill(coordinates(rotary, dropped, x), 0)
        if any(isinstance(edit, FrequencyLimit) and edit.without_rest for edit in self.edits):
            x = x.masked_fill(~coordinates(rotary, rotary.frequencies != 0, x), 0)
        return x

    def turned_on(
        self, x: Tensor, which: Side, own: Tensor, rotary: Rotary, tables: bool
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Turn vectors at their own positions, or with ``tables`` at those of replaced tables, by the missing angle."""
        angles = self.phases(rotary, own, len(x))
        if self.of_positions and not tables:
            angles = angles + self.angles(rotary, self.places(which, own, len(x))) - rotary.angles(own)
        if isinstance(angles, Tensor):
            x = turn(x, angles[..., None, :], rotary.pairing, 1.0)
        return self.kept(x, rotary, which)

    def frequencies(self, rotary: Rotary) -> Rotary:
        """Return the rotation that applies to distances: frequencies frozen and divided by the scale."""
        frequencies, frozen = rotary.frequencies / self.scale, self.removed("freeze", rotary)
        if frozen is not None:
            frequencies = frequencies.masked_fill(frozen.to(frequencies.device), 0.0)
        return replace(rotary, frequencies=frequencies)

    def table(self, seen: Tensor, own: Tensor, rotary: Rotary, which: Literal["cos", "sin"], texts: int) -> Tensor:
        """Apply these edits to the model's own table of cosines or sines."""
        if self.position is not None or self.scale != 1.0:
            seen = table_like(seen, rotary, self.places("q", own, texts), which)
        frozen = self.removed("freeze", rotary)
        if frozen is not None:
            columns = in_columns_of(seen, frozen.to(seen.device))
            seen = seen.masked_fill(columns, rotary.attention_factor if which == "cos" else 0.0)
        return seen


def compose(edits: Sequence[RotationEdit]) -> HeadRotation:
    """Compose the edits of one head in an order that does not depend on the order given."""
    return HeadRotation(tuple(sorted(edits, key=lambda edit: (type(edit).__name__, edit.call))))


_ROUNDING = 1e-6  # relative: models keep frequencies in float32


def within_band(rotary: Rotary, low: float, high: float) -> Bool[Tensor, " subspace"]:
    """Find the subspaces whose frequency lies in the band, both ends included, up to the rounding of frequencies."""
    size, known = rotary.frequencies.abs(), torch.finfo(rotary.frequency_dtype)
    relative, absolute = max(_ROUNDING, known.eps), known.eps * known.smallest_normal  # float16 has no slower ones

    def near(end: float) -> float:
        return relative * end + absolute if end else 0.0

    return (size >= low - near(low)) & (size <= high + near(high))


def coordinates(rotary: Rotary, subspaces: Bool[Tensor, " subspace"], x: Tensor) -> Bool[Tensor, " d_head"]:
    """Return a mask of the coordinates of ``x`` that make up these subspaces."""
    twice = torch.cat([subspaces, subspaces]) if rotary.pairing == "half" else subspaces.repeat_interleave(2)
    return torch.nn.functional.pad(twice, (0, x.shape[-1] - len(twice))).to(x.device)


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


def check_patch(name: str, given: Tensor, own: Tensor) -> None:
    """Refuse patched vectors whose shape differs from the run's own; ``own`` are those of some heads."""
    wanted = (*own.shape[:2], given.shape[2], own.shape[3])
    if given.shape != wanted:
        raise ArgumentError(name, f"must have the shape of the run's own, {wanted}, got {tuple(given.shape)}")
