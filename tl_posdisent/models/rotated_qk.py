"""Where rotated queries and keys are read and set, and scores are read.

Layers differ: the hook lies behind the rotation, or only before it, where the model's own table has yet to turn what is
put in; and that table may have been exchanged (``lies.py``). A ``Door`` knows; what passes through it is rotated in
both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.rope.rotary import Rotary, rotate, unrotate

from .forward import Hook
from .spec import AttentionSpec, Tap


@dataclass(frozen=True)
class Door:
    """Where rotated queries or keys are read and set.

    ``ahead`` is the rotation that the model has yet to make behind this hook, to ``positions`` (None for 0, 1, 2 …);
    None where the vectors are rotated already.
    """

    tap: Tap
    ahead: Rotary | None = None
    positions: Tensor | None = None

    def read(self, x: Tensor) -> Float[Tensor, "batch pos h d_head"]:
        """The hook's tensor as rotated vectors."""
        vectors = self.tap.read(x)
        # In float64, or what is turned and turned back would not be the same.
        return vectors if self.ahead is None else rotate(vectors.double(), self.place(vectors), self.ahead)

    def write(self, rotated: Float[Tensor, "batch pos h d_head"]) -> Float[Tensor, "batch pos h d_head"]:
        """Rotated vectors as they have to be at the hook."""
        return rotated if self.ahead is None else unrotate(rotated.double(), self.place(rotated), self.ahead)

    def place(self, x: Tensor) -> Tensor:
        """The positions to which the model is going to turn these vectors."""
        return torch.arange(x.shape[1], device=x.device) if self.positions is None else self.positions.to(x.device)


def doors(spec: AttentionSpec, positions: Tensor | None) -> tuple[Door, Door]:
    """The doors for queries and for keys in a run in which all heads see these positions by ``swap_positions``."""
    if spec.rotary is None and spec.q and spec.k:
        return Door(spec.q), Door(spec.k)
    rotary = spec.require_rotary("patching")

    def door(turn: Tap | None, plain: Tap | None) -> Door:
        assert turn is not None
        if plain is not None and turn.name != plain.name:
            return Door(turn)
        return Door(turn, rotary, positions if spec.cos else None)  # without tables the vectors are turned instead

    return door(spec.turn_q, spec.q), door(spec.turn_k, spec.k)


def listen_vectors(spec: AttentionSpec, positions: Tensor | None, held: dict[str, Tensor]) -> list[Hook]:
    """Hooks that keep a layer's rotated vectors in ``held``, under ``"q"`` and ``"k"``."""

    def listen(which: str, door: Door) -> Hook:
        def keep(x: Tensor, hook: Any) -> None:
            held[which] = door.read(x.detach()).clone()

        return door.tap.name, keep

    return [listen(which, door) for which, door in zip("qk", doors(spec, positions), strict=True)]


def listen_scores(spec: AttentionSpec, positions: Tensor | None, held: dict[str, Tensor]) -> list[Hook]:
    """Hooks that keep a layer's scores in ``held``, under ``"scores"``."""
    if spec.scores is None:
        return _listen_products(spec, positions, held)

    def keep(x: Tensor, hook: Any) -> None:
        held["scores"] = x.detach().clone()

    return [(spec.scores, keep)]


def _listen_products(spec: AttentionSpec, positions: Tensor | None, held: dict[str, Tensor]) -> list[Hook]:
    """The same where a model does not show its scores."""
    spec.require_scale()
    assert spec.pattern is not None

    def multiply(x: Tensor, hook: Any) -> None:
        held["scores"] = spec.score(held.pop("q"), held.pop("k"))

    return [*listen_vectors(spec, positions, held), (spec.pattern, multiply)]
