"""Edits of a head's rotation (positions, frequencies, phases, vectors), and how several on one head compose.

A head under edits scores query i and key j by

    scale · Σ_c Re(q_ic · conj(k_jc) · exp(i (θ_c · (u_i - w_j) / s + ε_ic - ε_jc))) + what RoPE does not rotate

with positions u and w (or any distances in place of u - w) from at most one position intervention, s the product of
interpolation factors, ε the sum of all phase noise, θ_c = 0 where a frequency is frozen, and no term c where one is
dropped. The order in which the edits are given makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.models.reading.rotation_tables import table_like
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import Rotary, rotate, turn

Side = Literal["q", "k"]

Place = Callable[[Tensor, int], Tensor]
"""From the tokens' own positions, ``(pos,)`` or ``(batch, pos)``, and the number of texts to those that RoPE shall see,
in the same shapes."""

Distances = Callable[[Tensor, Tensor, int], Tensor]
"""From the positions of queries and of keys and the number of texts to distances ``[query, key]``,
``[head, query, key]`` or ``[batch, head or 1, query, key]``."""

Phases = Callable[[Rotary, Tensor, int], Tensor]
"""From a layer's rotary, the tokens' own positions and the number of texts to angles in radians, ``(pos, subspace)`` or
``(batch, pos, subspace)``."""

_CELLS_PER_BLOCK = 2**21


@dataclass(frozen=True, eq=False)
class RotationEdit:
    """What one call of a tool does to the rotation of the heads that it names. ``tool`` is for messages."""

    tool: str


@dataclass(frozen=True, eq=False)
class PositionMap(RotationEdit):
    """Other positions: the distance of query i and key j becomes ``queries[i] - keys[j]``.

    ``slots``: whether positions were given for each slot of the batch, whatever the tokens' own are.
    """

    queries: Place
    keys: Place
    slots: bool = False


@dataclass(frozen=True, eq=False)
class DistanceMap(RotationEdit):
    """Other distances, which need not be differences of positions."""

    distances: Distances
    slots: bool = False


@dataclass(frozen=True, eq=False)
class PositionScale(RotationEdit):
    """All distances divided by a factor."""

    factor: float


@dataclass(frozen=True, eq=False)
class FrequencyLimit(RotationEdit):
    """Subspaces that are left out (``"drop"``) or no longer turned (``"freeze"``): those outside a band."""

    outside: Bool[Tensor, "subspace"]
    mode: Literal["drop", "freeze"]
    low: float
    high: float

    def check(self, rotary: Rotary, layer: int) -> None:
        """Refuse a text that is rotated by other frequencies, if the band holds other subspaces of these."""
        surely_out = outside_band(rotary, self.low * (1 - _MEASURED), self.high * (1 + _MEASURED))
        surely_in = within_band(rotary, self.low * (1 + _MEASURED), self.high * (1 - _MEASURED))
        outside = self.outside.to(surely_in.device)
        if bool((surely_out & ~outside | surely_in & outside & (rotary.frequencies != 0)).any()):
            raise ValueError(
                f"low and high of {self.tool} leave other subspaces in this text than in short ones: layer {layer} "
                "rotates long texts by other frequencies. Give a text within the model's original context"
            )


@dataclass(frozen=True, eq=False)
class PhaseNoise(RotationEdit):
    """Angles added at each position, the same for queries and keys."""

    phases: Phases


@dataclass(frozen=True, eq=False)
class VectorPatch(RotationEdit):
    """Rotated queries or keys of another run, put in after all other edits."""

    q_rot: Float[Tensor, "batch pos head d_head"] | None
    k_rot: Float[Tensor, "batch pos kv d_head"] | None


@dataclass(frozen=True)
class HeadRotation:
    """All edits of one head's rotation, as one."""

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

    @cached_property
    def frozen(self) -> Tensor | None:
        return self._outside("freeze")

    @cached_property
    def dropped(self) -> Tensor | None:
        return self._outside("drop")

    def _outside(self, mode: str) -> Tensor | None:
        limits = [edit.outside for edit in self.edits if isinstance(edit, FrequencyLimit) and edit.mode == mode]
        return torch.stack(limits).any(0) if limits else None

    @property
    def q_rot(self) -> Tensor | None:
        return next((x.q_rot for x in self.edits if isinstance(x, VectorPatch) and x.q_rot is not None), None)

    @property
    def k_rot(self) -> Tensor | None:
        return next((x.k_rot for x in self.edits if isinstance(x, VectorPatch) and x.k_rot is not None), None)

    @property
    def patched(self) -> bool:
        return self.q_rot is not None or self.k_rot is not None

    @cached_property
    def of_positions(self) -> HeadRotation:
        """The edits that other rotation tables express: positions, interpolation, frozen frequencies."""
        kinds = (PositionMap, DistanceMap, PositionScale)
        return HeadRotation(
            tuple(e for e in self.edits if isinstance(e, kinds) or (isinstance(e, FrequencyLimit) and e.mode != "drop"))
        )

    @cached_property
    def of_keys(self) -> HeadRotation:
        """The edits that change keys, which heads may share."""
        return HeadRotation(
            tuple(
                e
                for e in self.edits
                if not (isinstance(e, FrequencyLimit) and e.mode == "drop")
                and not (isinstance(e, VectorPatch) and e.k_rot is None)
            )
        )

    @property
    def pairwise(self) -> bool:
        """Whether no turning of queries and keys gives these distances."""
        return isinstance(self.position, DistanceMap)

    @property
    def only_frozen(self) -> bool:
        return self.position is None and self.scale == 1.0 and not self.noise

    @property
    def slots(self) -> bool:
        return self.position is not None and self.position.slots

    def conflict(self) -> str | None:
        """Why these edits cannot act on one head, or None."""
        positions = [e.tool for e in self.edits if isinstance(e, (PositionMap, DistanceMap))]
        if len(positions) > 1:
            return _two_positions(positions)
        for name in ("q_rot", "k_rot"):
            patches = [e for e in self.edits if isinstance(e, VectorPatch) and getattr(e, name) is not None]
            if len(patches) > 1:
                return f"{name} is patched twice: patch it once"
            if patches and self.pairwise:
                return f"rotated vectors that are patched have no other distances: leave {positions[0]} out"
        return None

    # --- what they come to

    def places(self, which: Side, own: Tensor, texts: int) -> Tensor:
        """Positions that queries or keys are turned to."""
        if isinstance(self.position, PositionMap):
            own = (self.position.queries if which == "q" else self.position.keys)(own, texts).to(own.device)
        return own if self.scale == 1.0 else own.double() / self.scale

    def angles(self, rotary: Rotary, places: Tensor) -> Tensor:
        """Angles of all subspaces at these positions, noise left out."""
        angles = rotary.angles(places)
        return angles if self.frozen is None else angles.masked_fill(self.frozen.to(angles.device), 0.0)

    def phases(self, rotary: Rotary, own: Tensor, texts: int) -> Tensor | float:
        """The sum of all noise, in an order of its own (the sum in float64 of two does not depend on it)."""
        drawn = [edit.phases(rotary, own, texts).to(own.device) for edit in self.noise]
        return sum(drawn[1:], drawn[0]) if drawn else 0.0

    def rotated(self, x: Float[Tensor, "batch pos head d_head"], which: Side, own: Tensor, rotary: Rotary) -> Tensor:
        """Queries or keys, before rotation, at the places that they get; patched ones as they were given."""
        places = self.places(which, own, len(x))
        return self.turned(self.kept(x, rotary) if which == "q" else x, places, own, rotary)

    def turned(self, x: Tensor, places: Tensor, own: Tensor, rotary: Rotary) -> Tensor:
        """Vectors turned to places, with the noise of their own positions."""
        if self.frozen is None and not self.noise:
            return rotate(x, places, rotary)
        angles = self.angles(rotary, places) + self.phases(rotary, own, len(x))
        return turn(x, angles[..., None, :], rotary.pairing, rotary.attention_factor)

    def kept(self, q: Float[Tensor, "batch pos head d_head"], rotary: Rotary) -> Tensor:
        """Queries without the subspaces that are dropped: a term is gone when its query is 0."""
        return q if self.dropped is None else q.masked_fill(coordinates(rotary, self.dropped, q), 0)

    def turned_on(
        self, x: Tensor, which: Side, own: Tensor, rotary: Rotary, tables: bool
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Vectors at their own positions (``tables``: at those of exchanged tables), turned by what is missing."""
        edited = x if tables else self._moved(x, which, own, rotary)
        if self.noise:
            phases = self.phases(rotary, own, len(x))
            assert isinstance(phases, Tensor)
            edited = turn(edited, phases[..., None, :], rotary.pairing, 1.0)
        return self.kept(edited, rotary) if which == "q" else edited

    def _moved(self, x: Tensor, which: Side, own: Tensor, rotary: Rotary) -> Tensor:
        if self.position is None and self.scale == 1.0 and self.frozen is None:
            return x
        places = self.places(which, own, len(x))
        if self.frozen is None:
            return rotate(x, places, rotary, start=own)
        angles = self.angles(rotary, places) - rotary.angles(own)
        return turn(x, angles[..., None, :], rotary.pairing, 1.0)

    def frequencies(self, rotary: Rotary) -> Rotary:
        """The rotation with frequencies frozen and divided, as distances see it."""
        frequencies = rotary.frequencies / self.scale
        if self.frozen is not None:
            frequencies = frequencies.masked_fill(self.frozen.to(frequencies.device), 0.0)
        return replace(rotary, frequencies=frequencies)

    def table(self, seen: Tensor, own: Tensor, rotary: Rotary, which: Literal["cos", "sin"], texts: int) -> Tensor:
        """The model's own table of cosines or sines under these edits."""
        if self.position is not None or self.scale != 1.0:
            seen = table_like(seen, rotary, self.places("q", own, texts), which)
        if self.frozen is not None:
            seen = seen.masked_fill(_columns(seen, self.frozen), rotary.attention_factor if which == "cos" else 0.0)
        return seen


_ROUNDING = 1e-6  # relative: frequencies are read from tables in float32
_MEASURED = 1e-3  # relative: frequencies are measured on the table of one text


def within_band(rotary: Rotary, low: float, high: float) -> Bool[Tensor, "subspace"]:
    """Subspaces whose frequency lies in the band, both ends included."""
    size = rotary.frequencies.abs()
    return (size >= low * (1 - _ROUNDING)) & (size <= high * (1 + _ROUNDING))


def outside_band(rotary: Rotary, low: float, high: float) -> Bool[Tensor, "subspace"]:
    """Subspaces that turn, at a frequency outside the band."""
    return ~within_band(rotary, low, high) & (rotary.frequencies != 0)


def compose(edits: Sequence[RotationEdit]) -> HeadRotation:
    """Edits of one head in an order that does not depend on the one in which they came."""
    return HeadRotation(tuple(sorted(edits, key=lambda edit: (type(edit).__name__, edit.tool))))


def _two_positions(tools: Sequence[str]) -> str:
    return f"{' and '.join(sorted(tools))} each set its positions: apply at most one position intervention per head"


def coordinates(rotary: Rotary, subspaces: Bool[Tensor, "subspace"], x: Tensor) -> Bool[Tensor, "d_head"]:
    """The coordinates of ``x`` that make up these subspaces."""
    twice = torch.cat([subspaces, subspaces]) if rotary.pairing == "half" else subspaces.repeat_interleave(2)
    return torch.nn.functional.pad(twice, (0, x.shape[-1] - len(twice))).to(x.device)


def _columns(table: Tensor, subspaces: Bool[Tensor, "subspace"]) -> Bool[Tensor, "column"]:
    """The columns of a table that belong to these subspaces: one each or two."""
    n, columns = len(subspaces), subspaces.to(table.device)
    if table.shape[-1] != 2 * n:
        return columns
    halves = torch.equal(table[..., :n], table[..., n:])
    return torch.cat([columns, columns]) if halves else columns.repeat_interleave(2)


# --- scores under edits


def rotated_scores(
    spec: AttentionSpec,
    rotation: HeadRotation,
    heads: Sequence[int],
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    own: tuple[Tensor, Tensor],
) -> Float[Tensor, "batch head query key"]:
    """Scores of some heads' unrotated queries and keys (one key head per query head) under their edits.

    Soft cap applied, mask not. Computed in float32 (float64 for float64). ``own`` are the positions of queries
    and of keys.
    """
    if not isinstance(rotation.position, DistanceMap):
        return spec.score(*rotated_vectors(spec, rotation, heads, q, k, own))
    rotary = spec.require_rotary("rotation edits")
    distances = rotation.position.distances(*own, len(q))
    _check_distances(spec, distances, len(q), (q.shape[1], k.shape[1]))
    in_place = HeadRotation(tuple(edit for edit in rotation.edits if isinstance(edit, (PhaseNoise, FrequencyLimit))))
    q, k = (in_place.turned_on(_wide(x), which, at, rotary, tables=True) for x, which, at in _sides(q, k, own))
    other = replace(spec, rotary=rotation.frequencies(rotary))
    return pair_scores(other, q, k, _of_heads(distances, heads, spec.n_heads))


def rotated_vectors(
    spec: AttentionSpec,
    rotation: HeadRotation,
    heads: Sequence[int],
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    own: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """The queries and keys behind ``rotated_scores``, for edits that are no ``DistanceMap``."""
    if not rotation:
        return spec.rotated(_wide(q), own[0]), spec.rotated(_wide(k), own[1])
    rotary = spec.require_rotary("rotation edits")
    both = []
    for x, which, at in _sides(q, k, own):
        given = rotation.q_rot if which == "q" else rotation.k_rot
        if given is None:
            both.append(rotation.rotated(_wide(x), which, at, rotary))
            continue
        check_patch(f"{which}_rot", given, x)
        patched = given[:, :, list(heads) if which == "q" else [spec.key_head(h) for h in heads]]
        both.append(patched.to(_wide(x)))
    return both[0], both[1]


def check_patch(name: str, given: Tensor, own: Tensor) -> None:
    """Refuse vectors of another text; ``own`` are those of some heads."""
    wanted = (*own.shape[:2], given.shape[2], own.shape[3])
    if given.shape != wanted:
        raise ValueError(f"{name} must have the shape of the run's own, {wanted}, got {tuple(given.shape)}")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_distances(spec: AttentionSpec, distances: Tensor, batch: int, shape: tuple[int, int]) -> None:
    """Refuse distances that do not fit the running text."""
    allowed = [shape, *((h, *shape) for h in (1, spec.n_heads))]
    allowed += [(b, *heads) for b in (1, batch) for heads in allowed[1:]]
    if tuple(distances.shape) not in allowed:
        raise ValueError(
            f"distances must have shape (query, key) = {shape}, (head, query, key) or (batch, head, query, key) with "
            f"{spec.n_heads} heads and {batch} texts (or 1), got {tuple(distances.shape)}"
        )
    at = torch.arange(shape[1], device=distances.device)
    inside = spec.sees(at[shape[1] - shape[0] :, None] - at)
    if not bool((distances.isfinite() | ~inside).all()):
        raise ValueError("distances must be finite inside the mask")


def _sides(
    q: Tensor, k: Tensor, own: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Side, Tensor], tuple[Tensor, Side, Tensor]]:
    return (q, "q", own[0]), (k, "k", own[1])


def _of_heads(distances: Tensor, heads: Sequence[int], n_heads: int) -> Tensor:
    """The chosen heads of distances that are given per head."""
    if distances.ndim >= 3 and distances.shape[-3] == n_heads and n_heads > 1:
        return distances[..., torch.tensor(list(heads), device=distances.device), :, :]
    return distances


def pair_scores(
    spec: AttentionSpec,
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    distances: Float[Tensor, "*lead query key"],
) -> Float[Tensor, "batch head query key"]:
    """Scores of unrotated queries and keys (one key head per query head) at the given distances.

    Soft cap applied, mask not. Computed in float32 (float64 for float64), a few million cells at a time.
    """
    rotary = spec.require_rotary("pair_scores")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    n, out = rotary.dim // 2, []
    frequencies = rotary.frequencies.to(q.device)
    q_first, q_second, q_rest = _planes(q.to(wide), rotary.pairing, n)
    k_first, k_second, k_rest = _planes(k.to(wide), rotary.pairing, n)
    rows = max(1, _CELLS_PER_BLOCK // (q.shape[0] * q.shape[2] * k.shape[1]))
    for start in range(0, q.shape[1], rows):
        some = slice(start, start + rows)
        block = torch.einsum("bqhd,bkhd->bhqk", q_rest[:, some], k_rest)
        here = distances[..., some, :].to(q.device).double().nan_to_num(0.0, 0.0, 0.0)  # hidden cells may hold anything
        for c in range(n):
            angle = here * frequencies[c]  # in float64: it may be many turns
            cos, sin = angle.cos().to(wide), angle.sin().to(wide)
            qx, qy = (x[:, some, :, c].transpose(1, 2)[..., None] for x in (q_first, q_second))
            kx, ky = (x[..., c].transpose(1, 2)[..., None, :] for x in (k_first, k_second))
            turned = (qx * kx + qy * ky) * cos - (qy * kx - qx * ky) * sin
            block += rotary.attention_factor**2 * turned
        out.append(spec.capped(block * spec.require_scale()))
    return torch.cat(out, 2)


def _planes(x: Tensor, pairing: str, n: int) -> tuple[Tensor, Tensor, Tensor]:
    if pairing == "half":
        return x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return x[..., : 2 * n : 2], x[..., 1 : 2 * n : 2], x[..., 2 * n :]
