"""Read and write rotated queries and keys at hooks after or before the rotation, and read scores.

In some layers a hook after the rotation takes effect, in others only one before it, whose vectors the model's own table
then rotates; and an intervention may have replaced that table. ``RotatedTap`` reads and writes rotated vectors in both
cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.reading.rotation_tables import rotated_by_table
from tl_posdisent.models.reading.spec import AttentionSpec, Tap
from tl_posdisent.rope.rotary import Rotary, rotate, unrotate


@dataclass(frozen=True)
class RotatedTap:
    """A hook at which rotated queries or keys are read and written.

    ``ahead`` is the rotation that the model applies after this hook, to ``positions`` (None for 0, 1, 2 …); None if the
    vectors at the hook are rotated already.
    """

    tap: Tap
    ahead: Rotary | None = None
    positions: Tensor | None = None

    def read(self, x: Tensor) -> Float[Tensor, "batch pos h d_head"]:
        """Return the hook's tensor as rotated vectors."""
        vectors = self.tap.read(x)
        # In float64: rotating and rotating back must give the same vectors.
        return vectors if self.ahead is None else rotate(vectors.double(), self.place(vectors), self.ahead)

    def write(self, rotated: Float[Tensor, "batch pos h d_head"]) -> Float[Tensor, "batch pos h d_head"]:
        """Convert rotated vectors to those that the hook expects."""
        return rotated if self.ahead is None else unrotate(rotated.double(), self.place(rotated), self.ahead)

    def place(self, x: Tensor) -> Tensor:
        """Positions to which the model will rotate these vectors."""
        return torch.arange(x.shape[1], device=x.device) if self.positions is None else self.positions.to(x.device)


def rotated_taps(spec: AttentionSpec, positions: Tensor | None) -> tuple[RotatedTap, RotatedTap]:
    """Return the taps of queries and keys in a run in which ``swap_positions`` gives all heads these positions."""
    if spec.rotary is None and spec.q and spec.k:
        return RotatedTap(spec.q), RotatedTap(spec.k)
    rotary = spec.require_rotary("patching")

    def tap_of(turn: Tap | None, plain: Tap | None) -> RotatedTap:
        assert turn is not None
        if plain is not None and turn.name != plain.name:
            return RotatedTap(turn)
        return RotatedTap(turn, rotary, positions if spec.cos else None)  # without tables, vectors are rotated

    return tap_of(spec.turn_q, spec.q), tap_of(spec.turn_k, spec.k)


def listen_vectors(spec: AttentionSpec, positions: Tensor | None, held: dict[str, Tensor]) -> list[Hook]:
    """Hooks that keep a layer's rotated vectors in ``held``, under ``"q"`` and ``"k"``."""
    taps = rotated_taps(spec, positions)
    if spec.holds_to is not None and spec.cos and spec.sin and all(rotated.ahead is not None for rotated in taps):
        return _listen_and_rotate(spec, held)

    def listen(which: str, rotated: RotatedTap) -> Hook:
        def keep(x: Tensor, hook: Any) -> None:
            held[which] = rotated.read(x.detach()).clone()

        return rotated.tap.name, keep

    return [listen(which, rotated) for which, rotated in zip("qk", taps, strict=True)]


def _listen_and_rotate(spec: AttentionSpec, held: dict[str, Tensor]) -> list[Hook]:
    """The same for models that rotate long texts by other tables than short ones, by the tables of the text."""
    assert spec.turn_q
    assert spec.turn_k
    assert spec.cos
    assert spec.sin
    taps = {"q": spec.turn_q, "k": spec.turn_k}
    seen: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor, hook: Any) -> None:
        seen[name] = x.detach().clone()
        if len(seen) == len(names):
            rotary = spec.require_rotary("patching")
            vectors = {which: tap.read(seen[which]) for which, tap in taps.items()}
            held.update({which: rotated_by_table(x, seen["cos"], seen["sin"], rotary) for which, x in vectors.items()})
            seen.clear()

    names = {"q": spec.turn_q.name, "k": spec.turn_k.name, "cos": spec.cos, "sin": spec.sin}
    return [(hook, partial(keep, name)) for name, hook in names.items()]


def listen_scores(spec: AttentionSpec, positions: Tensor | None, held: dict[str, Tensor]) -> list[Hook]:
    """Hooks that keep a layer's scores in ``held``, under ``"scores"``."""
    if spec.scores is None:
        return _listen_products(spec, positions, held)

    def keep(x: Tensor, hook: Any) -> None:
        held["scores"] = x.detach().clone()

    return [(spec.scores, keep)]


def _listen_products(spec: AttentionSpec, positions: Tensor | None, held: dict[str, Tensor]) -> list[Hook]:
    """Hooks that compute the scores of a model that does not return them."""
    spec.require_scale()
    assert spec.pattern is not None

    def multiply(x: Tensor, hook: Any) -> None:
        held["scores"] = spec.score(held.pop("q"), held.pop("k"))

    return [*listen_vectors(spec, positions, held), (spec.pattern, multiply)]
