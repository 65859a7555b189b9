"""The three ways to lie to RoPE about positions, and the conditions under which they are true to their word.

Each layer takes the most exact way that it has: exchanging the model's rotation tables (to the last bit, where the
model has hooks for them and all heads see the same positions), turning queries and keys by the difference, and
recomputing scores where a key would have to stand at two places at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.models.forward import Hook
from tl_posdisent.models.probe.observe import is_masked, mismatch
from tl_posdisent.models.rotation_tables import table_like
from tl_posdisent.models.spec import AttentionSpec, Tap, select
from tl_posdisent.rope.rotary import rotate

from .pairwise_scores import Distances, pair_hooks
from .score_edits import check_whole_text

Place = Callable[[int, torch.device], Tensor]
"""From a length to positions, ``(pos,)`` or ``(batch, pos)``; raises if they are positions of another length."""


@dataclass(frozen=True)
class Lie:
    """Distances ``queries[i] - keys[j]``. ``texts`` is how many texts have positions of their own, 1 for none."""

    queries: Place
    keys: Place
    texts: int = 1


def lie_hooks(specs: Sequence[AttentionSpec], lie: Lie, heads: Iterable[int] | None) -> list[Hook]:
    """Hooks for a lie in each of the layers, for these heads."""
    hooks: list[Hook] = []
    chosen = select("heads", heads, specs[0].n_heads)
    for spec in specs:
        groups = {spec.key_head(h) for h in chosen}
        whole = len(chosen) == len(groups) * (spec.n_heads // spec.n_kv_heads)
        if lie.texts > 1 and spec.q:
            hooks.append(_as_many_texts(spec.q.name, lie.texts))
        if lie.queries is lie.keys and len(chosen) == spec.n_heads and spec.cos and spec.sin:
            hooks += [_exchange(spec, lie.queries, spec.cos, "cos"), _exchange(spec, lie.queries, spec.sin, "sin")]
        elif whole and spec.turn_q and spec.turn_k:
            hooks += known_positions(spec)
            hooks += [_turn(spec, spec.turn_q, lie.queries, chosen), _turn(spec, spec.turn_k, lie.keys, sorted(groups))]
        else:
            hooks += pair_hooks(spec, chosen, _differences(lie))
    return hooks


def _exchange(spec: AttentionSpec, place: Place, name: str, which: str) -> Hook:
    """The model's table of cosines or sines, made for other positions."""
    rotary = spec.require_rotary("swap_positions")

    def exchange(x: Tensor, hook: Any) -> Tensor:
        return table_like(x, rotary, place(x.shape[1], x.device), which)

    return name, exchange


def _turn(spec: AttentionSpec, tap: Tap, place: Place, heads: Sequence[int]) -> Hook:
    """Queries or keys of some heads, turned from where they stand to where they shall."""
    rotary = spec.require_rotary("turning")

    def turn(x: Tensor, hook: Any) -> Tensor:
        vectors = tap.read(x)
        real = torch.arange(vectors.shape[1], device=x.device)
        moved = rotate(vectors, place(vectors.shape[1], x.device), rotary, start=real)
        if len(heads) < tap.n_heads:
            some = torch.zeros(tap.n_heads, 1, dtype=torch.bool, device=x.device)
            some[list(heads)] = True
            moved = torch.where(some, moved, vectors)
        return tap.write(moved)

    return tap.name, turn


def _differences(lie: Lie) -> Distances:
    def distances(length: int, device: torch.device) -> Tensor:
        queries, keys = (place(length, device).double() for place in (lie.queries, lie.keys))
        difference = queries[..., :, None] - keys[..., None, :]
        return difference if difference.ndim == 2 else difference[:, None]  # the same for all heads of a text

    return distances


def _as_many_texts(name: str, texts: int) -> Hook:
    """A table for another number of texts would silently broadcast."""

    def check(x: Tensor, hook: Any) -> None:
        if len(x) != texts:
            raise ValueError(f"positions were given for {texts} texts, and the model runs on {len(x)}")

    return name, check


def known_positions(spec: AttentionSpec) -> list[Hook]:
    """Turning by a difference needs to know where the vectors stand: refuse all but a whole text from position 0."""
    rotary = spec.require_rotary("turning")

    def whole_text(x: Tensor, hook: Any) -> None:
        check_whole_text(spec, x)
        hidden = is_masked(x[..., 0, 0]) if spec.scores else x[..., 0, 1:] > 0
        if spec.causal and bool(hidden.any()):
            raise ValueError(f"in layer {spec.layer} the first token is masked: run the model without padding")

    def usual_table(x: Tensor, hook: Any) -> None:
        usual = table_like(x, rotary, torch.arange(x.shape[1], device=x.device), "cos")
        if mismatch(x, usual.expand_as(x)) > 1:
            raise ValueError(
                f"the rotation table of layer {spec.layer} is not that of positions 0, 1, 2 …: run the model without "
                "padding, position_ids or a key/value cache, and lie to each head once"
            )

    name = spec.scores or spec.pattern
    hooks: list[Hook] = [(name, whole_text)] if name else []
    return [*hooks, (spec.cos, usual_table)] if spec.cos else hooks
