"""What interventions do to one head, as a record. The order in which records are merged makes no difference.

A head's scores become ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i (θ_c · D[i, j] / s + ε_ic - ε_jc)))`` plus the part
that RoPE does not rotate. D are the distances of the positions or those that are set, none above the ceiling; s is the
factor of interpolation and ε the noise; ``θ_c = 0`` if a frequency is frozen, and no term c if it is dropped. Rotated
queries or keys of another run replace their whole factor, but for dropped terms. Then keys are hidden, then the scores
are replaced, and last the head's output ``z``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.utils.validation import head_label

Head = tuple[int, int]
"""A layer and a query head of it."""


@dataclass(frozen=True, eq=False)
class Band:
    """A band of frequencies: subspaces outside (or ``inside``) are removed (``"drop"``) or not rotated (``"freeze"``).

    With ``without_rest``, what the layer does not rotate is removed, too.
    """

    low: float
    high: float
    mode: Literal["drop", "freeze"]
    inside: bool
    without_rest: bool

    def removed(self, rotary: Rotary) -> Bool[Tensor, " subspace"]:
        """Find the rotating subspaces that are dropped or frozen."""
        band = within_band(rotary, self.low, self.high)
        return (band if self.inside else ~band) & (rotary.frequencies != 0)


_ROUNDING = 1e-6  # relative: models keep frequencies in float32


def within_band(rotary: Rotary, low: float, high: float) -> Bool[Tensor, " subspace"]:
    """Find the subspaces whose frequency lies in the band, both ends included, up to the rounding of frequencies."""
    size, known = rotary.frequencies.abs(), torch.finfo(rotary.frequency_dtype)
    relative, absolute = max(_ROUNDING, known.eps), known.eps * known.smallest_normal  # float16 has no slower ones

    def near(end: float) -> float:
        return relative * end + absolute if end else 0.0

    return (size >= low - near(low)) & (size <= high + near(high))


@dataclass(frozen=True, eq=False)
class Noise:
    """Angles in radians added at each position, the same for queries and keys.

    Given as ``(pos, subspace)`` or ``(batch, pos, subspace)``, as a function from a layer's rotary to such angles, or
    as the standard deviation with which they are drawn.
    """

    angles: Float[Tensor, "*batch pos subspace"] | Callable[[Rotary], Tensor] | float
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Hidden:
    """Keys that a query does not see: a function of the number of texts, their length and the device."""

    call: str
    cells: Callable[[int, int, torch.device], Bool[Tensor, "*batch query key"]]
    from_start: bool = False  # whether they are counted from the beginning of the text
    by_text: bool = False  # whether they were given for the texts of a batch


@dataclass(frozen=True)
class View:
    """What new scores may be computed from in a forward pass: some heads of one layer.

    Attributes:
        inside: where a query sees a key, padding left out.
        scores: under all edits of the rotation: in the model's dtype, soft cap included, arbitrary outside the mask.
        vectors: queries and keys before rotation, keys repeated for every query head that reads them; None unless they
            were asked for.
    """

    spec: AttentionSpec
    heads: Sequence[int]
    inside: Bool[Tensor, "batch head query key"]
    scores: Float[Tensor, "batch head query key"]
    vectors: Any


@dataclass(frozen=True, eq=False)
class NewScores:
    """New scores of heads, used inside the mask only.

    Attributes:
        of: computes them.
        vectors: whether that takes queries and keys.
        replaces: whether they do not depend on the scores of the pass, so that an edit of the rotation would be lost.
    """

    of: Callable[[View], Tensor]
    vectors: bool = False
    replaces: bool = False


@dataclass(frozen=True, eq=False)
class NewResult:
    """Replacement of heads' output: maps ``(layer, heads, z [batch, pos, head, d_head])`` to new z."""

    of: Callable[[int, Sequence[int], Tensor], Tensor]
    by_slot: bool = False  # whether it was given for slots of a whole text
    resamples: bool = False  # whether a text gets what another text of the batch has


@dataclass(frozen=True, eq=False)
class Edit:
    """What is edited in one head; None: as the model has it.

    Attributes:
        calls: the call that set each field, in a short form.
        positions: one for each slot, or a function of the positions 0, 1, 2 ….
        distances: one for all pairs, a function of the real ones, or a matrix.
        ceiling: no distance exceeds this one.
        factor: all distances are divided by it.
        band: frequencies that are dropped or frozen.
        noise: phases that are added.
        q_rot, k_rot: rotated queries and keys of another run, of all heads.
        hide: keys that are hidden; those of several calls unite.
        scores: new scores.
        z: a new output.
    """

    calls: Mapping[str, str] = field(default_factory=dict)
    positions: Float[Tensor, "*batch pos"] | Callable[[Tensor], Tensor] | None = None
    distances: Float[Tensor, "*lead query key"] | Callable[[Tensor], Tensor] | float | None = None
    ceiling: float | None = None
    factor: float | None = None
    band: Band | None = None
    noise: Noise | None = None
    q_rot: Float[Tensor, "batch pos head d_head"] | None = None
    k_rot: Float[Tensor, "batch pos kv d_head"] | None = None
    hide: tuple[Hidden, ...] = ()
    scores: NewScores | None = None
    z: NewResult | None = None

    @property
    def call_names(self) -> list[str]:
        """The calls that set the fields, each once."""
        given = [call for name, call in self.calls.items() if name != "hide"] + [each.call for each in self.hide]
        return list(dict.fromkeys(given))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What two heads share that can be edited together."""
        values = (getattr(self, x.name) for x in fields(self) if x.name != "calls")
        return tuple(x if isinstance(x, (float, tuple)) else id(x) for x in values)

    @property
    def rotation(self) -> list[str]:
        """The fields of the rotation that are set."""
        return [name for name in _ROTATION if getattr(self, name) is not None]

    @property
    def edits_scores(self) -> bool:
        return bool(self.rotation or self.hide or self.scores)

    @property
    def by_text(self) -> bool:
        """Whether it was made for the texts of one batch, or a text gets what another text of the batch has."""
        noise = None if self.noise is None else self.noise.angles
        given = ((self.positions, 1), (self.distances, 3), (noise, 2), (self.q_rot, 3), (self.k_rot, 3))
        several = any(isinstance(x, Tensor) and x.ndim > n and len(x) > 1 for x, n in given)
        return several or any(each.by_text for each in self.hide) or (self.z is not None and self.z.resamples)

    @property
    def from_start(self) -> str:
        """The call that counts positions from a text's beginning, or an empty string."""
        if callable(self.positions) and not isinstance(self.positions, Tensor):
            return self.calls["positions"]
        if self.noise is not None and isinstance(self.noise.angles, float):
            return self.calls["noise"]
        return next((each.call for each in self.hide if each.from_start), "")


_ROTATION = ("positions", "distances", "ceiling", "factor", "band", "noise", "q_rot", "k_rot")
_WORDS = {
    "positions": "its positions",
    "distances": "its distances",
    "ceiling": "the largest distance",
    "factor": "the factor of interpolation",
    "band": "the band of frequencies",
    "noise": "the noise of its phases",
    "q_rot": "its rotated queries",
    "k_rot": "its rotated keys",
    "scores": "its scores",
    "z": "its output",
}


def edit(call: str, **given: Any) -> Edit:
    """Return the record of one call, which sets these fields."""
    return Edit(dict.fromkeys(given, call), **given)


def merged(head: Head, a: Edit, b: Edit) -> Edit:
    """Return the record of both; raise if they conflict."""
    twice = [name for name in _WORDS if name in a.calls and name in b.calls]
    if twice:
        raise _conflict(head, a.calls[twice[0]], b.calls[twice[0]], f"both set {_WORDS[twice[0]]}")
    given = {name: getattr(b, name) for name in b.calls}
    both = replace(a, **given | {"calls": {**a.calls, **b.calls}, "hide": a.hide + b.hide})
    calls = both.calls
    if both.positions is not None and both.distances is not None:
        raise _conflict(head, calls["positions"], calls["distances"], "both set its positions")
    patched = next((name for name in ("q_rot", "k_rot") if name in calls), None)
    apart = next((name for name in ("distances", "ceiling") if name in calls), None)
    if patched and apart:
        why = "cannot act together: patched vectors are already rotated to positions of their own, and"
        raise _conflict(head, calls[patched], calls[apart], f"{why} {_tool(calls[apart])} sets distances alone")
    if both.scores and both.scores.replaces and both.rotation:
        lost = calls[both.rotation[0]]
        why = f"cannot act together: the first replaces the scores, so that {_tool(lost)} would be lost"
        raise _conflict(head, calls["scores"], lost, why)
    return both


def _conflict(head: Head, first: str, second: str, why: str) -> ValueError:
    layer, number = head
    return ValueError(f"layer {layer}, head {number} ({head_label(*head)}): {first} and {second} {why}: leave one out")


def _tool(call: str) -> str:
    return call.partition("(")[0]
