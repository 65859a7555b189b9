"""Hooks that keep a layer's rotated queries and keys, or its scores, in a run under interventions on positions.

Some layers show rotated vectors, others only those before the rotation, which the model's own table then rotates; and
an intervention may have replaced that table.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.reading.rotation_tables import rotated_by_table
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import rotate


def listen_vectors(spec: AttentionSpec, positions: Tensor | None, held: dict[str, Tensor]) -> list[Hook]:
    """Hooks that keep a layer's rotated vectors in ``held``, under ``"q"`` and ``"k"``.

    ``positions`` are those that ``swap_positions`` gives all heads in this run, None for 0, 1, 2 …
    """
    plain = {"q": spec.q, "k": spec.k}
    rotary = None if spec.rotary is None and spec.q and spec.k else spec.require_rotary("patching")
    turned = plain if rotary is None else {"q": spec.turn_q, "k": spec.turn_k}
    taps = {which: tap for which, tap in turned.items() if tap is not None}
    behind = {which: (other := plain[which]) is not None and other.name != tap.name for which, tap in taps.items()}
    names = {which: tap.name for which, tap in taps.items()}
    by_table = spec.holds_to is not None and spec.cos and spec.sin and not any(behind.values())
    if by_table:  # long texts are rotated by other tables than short ones
        names |= {name: hook for name, hook in (("cos", spec.cos), ("sin", spec.sin)) if hook}
    if not spec.cos:  # without tables to replace, interventions turn the vectors themselves
        positions = None
    seen: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor, hook: Any) -> None:
        seen[name] = x.detach().clone()
        if len(seen) < len(names):
            return
        for which, tap in taps.items():
            vectors = held[which] = tap.read(seen[which])
            if rotary is not None and by_table:
                held[which] = rotated_by_table(vectors, seen["cos"], seen["sin"], rotary)
            elif rotary is not None and not behind[which]:
                at = torch.arange(vectors.shape[1], device=vectors.device) if positions is None else positions
                # In float64: rotating and rotating back must give the same vectors.
                held[which] = rotate(vectors.double(), at.to(vectors.device), rotary)
        seen.clear()

    return [(hook, partial(keep, name)) for name, hook in names.items()]


def listen_scores(spec: AttentionSpec, positions: Tensor | None, held: dict[str, Tensor]) -> list[Hook]:
    """Hooks that keep a layer's scores in ``held``, under ``"scores"``: its own, else those of its vectors."""

    def keep(x: Tensor, hook: Any) -> None:
        held["scores"] = x.detach().clone() if spec.scores else spec.score(held.pop("q"), held.pop("k"))

    if spec.scores is not None:
        return [(spec.scores, keep)]
    spec.require_scale()
    assert spec.pattern is not None
    return [*listen_vectors(spec, positions, held), (spec.pattern, keep)]
