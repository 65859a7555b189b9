"""Putting other scores in the place of a layer's own.

Where an edit of the scores reaches the output, that is one hook. Where the model throws edited scores away, the
attention's result is recomputed from the new scores and put in at ``hook_z``. Whoever edits need not know which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.models.forward import Hook
from tl_posdisent.models.probe.observe import is_masked
from tl_posdisent.models.spec import AttentionSpec


@dataclass(frozen=True)
class View:
    """What an edit may look at: one layer's chosen heads in one forward pass.

    Attributes:
        inside: where a query sees a key, padding left out; broadcasts to the scores.
        held_scores: ``[batch, chosen head, query, key]`` in the model's dtype, soft cap included, anything outside
            the mask; None if not asked for.
        held_vectors: queries and keys before rotation, ``[batch, pos, chosen head, d_head]`` each, keys repeated for
            every query head that reads them; None if not asked for.
    """

    inside: Bool[Tensor, "*lead query key"]
    held_scores: Tensor | None
    held_vectors: tuple[Tensor, Tensor] | None

    def scores(self) -> Float[Tensor, "batch head query key"]:
        """The scores, if they were asked for."""
        assert self.held_scores is not None
        return self.held_scores

    def vectors(self) -> tuple[Float[Tensor, "batch pos head d_head"], Float[Tensor, "batch pos head d_head"]]:
        """Queries and keys, if they were asked for."""
        assert self.held_vectors is not None
        return self.held_vectors


Edit = Callable[[View], Tensor]
"""From what is there to new scores ``[batch, chosen head, query, key]``; ``-inf`` hides a key."""


def edit_scores(
    spec: AttentionSpec, heads: Sequence[int], edit: Edit, *, scores: bool = False, vectors: bool = False
) -> list[Hook]:
    """Hooks under which these heads of a layer attend by the scores that ``edit`` returns.

    Args:
        spec: the layer.
        heads: query heads, checked, in the order in which ``edit`` shall see them.
        edit: called once per forward pass. What it returns counts inside the mask only.
        scores, vectors: what ``edit`` wants to see.

    Raises:
        ValueError: a layer whose hooks do not serve. While running: parts of texts (a key/value cache); padding, where
            edited scores are discarded.
    """
    editable = spec.scores_editable and spec.scores is not None
    recompute = scores and spec.scores is None
    if not editable and (spec.v is None or spec.pattern is None or spec.z is None):
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture} uses neither edited scores nor an edited hook_z: "
            "its scores cannot be changed"
        )
    if (vectors or recompute) and (spec.q is None or spec.k is None):
        raise ValueError(f"layer {spec.layer} of {spec.architecture}: {spec.problem}")
    if recompute:
        spec.require_scale()
    chosen = torch.tensor(list(heads))
    key_heads = torch.tensor([spec.key_head(h) for h in heads])
    held: dict[str, Tensor] = {}

    def keep(name: str) -> Hook:
        def listen(x: Tensor, hook: Any) -> None:
            held[name] = x

        return name, listen

    def pair() -> tuple[Tensor, Tensor]:
        assert spec.q is not None
        assert spec.k is not None
        q, k = spec.q.read(held.pop(spec.q.name)), spec.k.read(held.pop(spec.k.name))
        return q[:, :, chosen.to(q.device)], k[:, :, key_heads.to(k.device)]

    def edited(inside: Tensor, own: Tensor | None) -> Tensor:
        q_and_k = pair() if vectors or recompute else None
        if recompute and q_and_k is not None:
            own = _recomputed(spec, *q_and_k)
        return edit(View(inside, own if scores else None, q_and_k))

    def replace_scores(x: Tensor, hook: Any) -> Tensor:
        check_whole_text(spec, x)
        old = x[:, chosen.to(x.device)]
        inside = spec.mask(x.shape[-1], x.device) & ~is_masked(old)  # padding stays masked
        new = edited(inside, old).to(x.dtype)
        x = x.clone()
        x[:, chosen.to(x.device)] = torch.where(inside, new, old)
        return x

    listeners = [keep(tap.name) for tap in (spec.q, spec.k) if tap and (vectors or recompute)]
    if editable and spec.scores:
        return [*listeners, (spec.scores, replace_scores)]
    v_tap, seen, z = spec.v, spec.pattern, spec.z
    assert v_tap is not None
    assert seen is not None
    assert z is not None
    if scores and spec.scores:
        listeners.append(keep(spec.scores))

    def replace_z(x: Tensor, hook: Any) -> Tensor:
        inside = spec.mask(x.shape[1], x.device)
        own = held.pop(spec.scores)[:, chosen.to(x.device)] if scores and spec.scores else None
        new, v = edited(inside, own), v_tap.read(held.pop(v_tap.name))
        new = new.to(torch.promote_types(new.dtype, torch.float32))
        pattern = new.masked_fill(~inside, -torch.inf).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", pattern, v[:, :, key_heads.to(v.device)].to(pattern.dtype))
        x = x.clone()
        x[:, :, chosen.to(x.device)] = mixed.to(x.dtype)
        return x

    def whole_and_unpadded(x: Tensor, hook: Any) -> None:
        check_whole_text(spec, x)
        _refuse_padding(spec, x)

    # In some models the pattern is the last to fire.
    return [*listeners, keep(v_tap.name), (z, replace_z), (seen, whole_and_unpadded)]


def _recomputed(spec: AttentionSpec, q: Tensor, k: Tensor) -> Tensor:
    """Scores of chosen heads at the real positions; one key head per query head."""
    positions = torch.arange(q.shape[1], device=q.device)
    q_rot, k_rot = (spec.rotated(x, positions) for x in (q, k))
    return spec.score(q_rot, k_rot)


def check_whole_text(spec: AttentionSpec, cells: Float[Tensor, "batch head query key"]) -> None:
    """Refuse scores of a part of a text: positions and masks are those of a whole one."""
    n_query, n_key = cells.shape[-2:]
    if n_query != n_key:
        raise ValueError(
            f"layer {spec.layer} sees {n_query} queries against {n_key} keys: run the model on whole texts, without "
            "a key/value cache"
        )


def _refuse_padding(spec: AttentionSpec, pattern: Tensor) -> None:
    """Where a model shows only its pattern: a key that nobody sees is padding, and so is a query that sees behind it
    (all keys alike, as a softmax of nothing but masked scores does)."""
    inside = spec.mask(pattern.shape[-1], pattern.device)
    if bool((pattern == 0).flatten(1, 2).all(1).any()) or bool((pattern[..., ~inside] > 0).any()):
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture} discards edited scores, and padded texts are not supported then"
        )
