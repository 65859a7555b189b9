"""State of one attention layer in a running forward pass: the tensors seen so far, positions, cached text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from tl_posdisent.hooks.edits import running_positions as text
from tl_posdisent.hooks.edits.cached_text import CachedText, before_and_now, continued, last_of
from tl_posdisent.hooks.edits.layer_plan import Grouped, LayerPlan, can_rescore, grouped
from tl_posdisent.hooks.edits.rotation_edits import HeadRotation
from tl_posdisent.models.running.kv_cache import WITHOUT_CACHE
from tl_posdisent.rope.rotary import Rotary


@dataclass
class Seen:
    """Tensors seen so far. Vectors are ``[batch, pos, head, d_head]``, before rotation and after any QK-norm."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    given_q: Tensor | None = None  # queries and keys as hooks turned them before the running positions were known
    given_k: Tensor | None = None
    cos: Tensor | None = None
    z: Tensor | None = None  # before the result of edited scores is put in


class LayerState:
    """State of one layer in one forward pass.

    Attributes:
        spec: the layer, with the rotation of the running text.
        plan, memory: how the edits are done; the text in the KV cache.
        seen: the tensors seen so far.
        own: the model's own positions of the queries; None until they are known.
        counted: index of each query in its text, regardless of its position.
        at_slots: whether the model's own positions are the slots of the batch, 0, 1, 2 …, padding included.
        recounted: whether edits take the indices in the text for positions, since padding precedes a text that the
            model positions by slots.
        rescored: heads whose scores are recomputed: those of the plan, or all with rotation edits if it ``fell_back``.
        fell_back: whether the running text's rotation table is not the expected one.
        start, continues: as in ``ActivePass``.
    """

    def __init__(self, plan: LayerPlan, memory: CachedText, start: int, continues: bool) -> None:
        self.plan, self.spec, self.memory = plan, plan.spec, memory
        self.seen = Seen()
        self.texts, self.n_query, self.dtype = 1, 0, torch.float32
        self.own: Tensor | None = None
        self.counted: Tensor | None = None
        self.at_slots = self.recounted = False
        self.rescored = plan.rescored
        self.fell_back = False
        self.start, self.continues = start, continues

    # --- the running text

    @property
    def cached(self) -> int:
        """Number of tokens of the text in the KV cache, if this pass continues it, otherwise 0."""
        return self.memory.seen if self.memory.texts == self.texts else 0

    @property
    def expected(self) -> Tensor:
        """Default positions of the queries: 0, 1, 2 …, or those that continue a cached text."""
        return torch.arange(self.start, self.start + self.n_query, device=self.queries.device)

    def places(self, n_key: int) -> tuple[Tensor, Tensor]:
        """Return the model's own positions of queries and keys."""
        assert self.own is not None
        return self.own, before_and_now(self.own, n_key, self.memory.places)

    def edited_places(self, n_key: int) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys for edits, from 0 at the first token of each text."""
        if not self.recounted:
            return self.places(n_key)
        query, key = self.counts(n_key)
        return query.clamp_min(0), key.clamp_min(0)

    def counts(self, n_key: int) -> tuple[Tensor, Tensor]:
        """Return the indices of queries and keys in their text."""
        assert self.counted is not None
        return self.counted, before_and_now(self.counted, n_key, self.memory.counted)

    def part(self, n_key: int) -> tuple[int, int] | None:
        """Return the slots (padding included) of the first query and the first key if the text is run in parts."""
        if n_key == self.n_query and not self.continues:
            return None
        n_slots = self.n_query + (self.memory.seen if n_key > self.n_query else 0)
        return n_slots - self.n_query, n_slots - n_key

    # --- what is done

    @property
    def misplaced(self) -> bool:
        """Whether vectors were turned for other positions than the model's, so that their scores are recomputed."""
        return self.fell_back and self.plan.turned_before

    @property
    def edits_scores(self) -> bool:
        return bool(self.rescored or self.plan.score_edits)

    @property
    def reads_mask(self) -> bool:
        """Whether something depends on the mask of the running text."""
        return (
            self.edits_scores
            or self.own is None
            or (self.at_slots and self.plan.by_place)
            or (self.plan.needs_positions and text.restarts(self.own))
        )

    @property
    def puts_in(self) -> bool:
        """Whether the result of edited scores is put in at ``hook_z``."""
        return self.edits_scores and self.spec.scores is None

    def use_rotary(self, rotary: Rotary) -> None:
        """Use the rotation of the running text from here on."""
        self.spec = replace(self.spec, rotary=rotary)

    def fall_back(self) -> None:
        """Switch to recomputing the scores of all heads with rotation edits."""
        if not can_rescore(self.spec):
            raise ValueError(
                f"the rotation table of layer {self.spec.layer} is not that of positions 0, 1, 2 …, and its scores "
                "cannot be recomputed: run the model without padding, position_ids or a KV cache"
            )
        self.fell_back = True
        self.rescored = grouped((head, rotation) for head, rotation in enumerate(self.plan.rotations) if rotation)

    def alike(self, heads: Iterable[int]) -> Grouped:
        """Group heads by the edits of their rotation."""
        return grouped((head, self.plan.rotations[head]) for head in heads)

    def in_force(self, *, pattern: bool, cached: bool) -> Grouped:
        """Group the heads whose scores must be known by the edits that the model has already applied."""
        rescored = {head for some in self.rescored.values() for head in some}
        read = {h for edit, heads in self.plan.score_edits if edit.vectors or pattern for h in heads}
        if cached or not self.spec.cos or (pattern and self.plan.by_place):
            read |= self.plan.heads
        now = HeadRotation() if self.fell_back else self.plan.table
        wanted = sorted(rescored | read)
        return grouped((head, now if head in rescored else self.plan.rotations[head]) for head in wanted)

    # --- vectors, those in the KV cache included

    @property
    def queries(self) -> Tensor:
        assert self.seen.q is not None
        return self.seen.q

    def vectors(self, heads: Sequence[int], n_key: int) -> tuple[Tensor, Tensor]:
        """Return unrotated queries and keys of some heads, one key head for each query head."""
        k = self._whole(self.keys(n_key), n_key)
        return self.queries[:, :, list(heads)], k[:, :, [self.spec.key_head(h) for h in heads]]

    def keys(self, n_key: int) -> Tensor:
        """Return the unrotated keys, of the last ``n_key`` as many as are known."""
        assert self.seen.k is not None
        return last_of(self.memory.keys, self.seen.k, n_key)

    def given_keys(self, n_key: int) -> Tensor:
        """Return the keys as hooks turned them, as many as are known."""
        now = self.seen.k if self.seen.given_k is None else self.seen.given_k
        assert now is not None
        return last_of(self.memory.given, now, n_key)

    def values(self, n_key: int) -> Tensor:
        """Return the values of all keys."""
        assert self.seen.v is not None
        return self._whole(last_of(self.memory.values, self.seen.v, n_key), n_key)

    def _whole(self, x: Tensor, n_key: int) -> Tensor:
        if x.shape[1] != n_key:
            self.refuse_part(n_key)
        return x

    # --- the KV cache

    def check_cache(self, n_key: int) -> None:
        """Refuse a KV cache that was not filled under the same interventions."""
        cached = n_key - self.n_query if self.n_query else 0
        slots = (e for r in self.plan.rotations for e in r.edits if e.slots and e.by_position)
        if cached and (given := next(slots, None)):
            raise ValueError(
                f"{given.tool} was given for each slot of a whole text, and layer {self.spec.layer} sees "
                f"{self.n_query} queries against {n_key} keys: give {given.by_position} for a KV cache, "
                f"or {WITHOUT_CACHE}"
            )
        if cached and not self.memory.holds(self.texts, cached, self.spec.window):
            self.refuse_cache(n_key)

    def check_whole(self, n_key: int, tool: str) -> None:
        if n_key != self.n_query:
            self.refuse_part(n_key, tool)

    def refuse_part(self, n_key: int, tool: str = "") -> NoReturn:
        raise ValueError(
            f"{tool}{': ' * bool(tool)}layer {self.spec.layer} sees {self.n_query} queries against {n_key} keys: "
            f"{WITHOUT_CACHE}"
        )

    def refuse_cache(self, n_key: int) -> NoReturn:
        raise ValueError(
            f"layer {self.spec.layer} sees {self.n_query} queries against {n_key} keys, of which the KV cache was "
            f"not filled under these hooks: fill it with use_cache=True and use it in one model.hooks block, or "
            f"{WITHOUT_CACHE}"
        )

    def remember(self, n_key: int) -> None:
        """Store what the next pass needs if it continues this text, which it can only with a KV cache."""
        memory = self.memory
        if n_key == self.n_query and not self.continues:
            memory.forget()
            return
        if n_key > self.n_query:
            memory.places = continued(memory.places, self.own)
            memory.counted = continued(memory.counted, self.counted)
            memory.seen += self.n_query
        else:
            memory.places, memory.counted, memory.seen = self.own, self.counted, self.n_query
        if self.seen.k is not None:
            # A pattern is compared for all keys.
            all_keys = self.plan.reads_vectors or self.spec.scores is None or self.fell_back
            keys = self.keys(n_key) if all_keys else self.seen.k[:, -1:]
            given = self.given_keys(n_key).detach().clone() if self.misplaced else None
            memory.keys, memory.given = keys.detach().clone(), given
        if self.puts_in:
            assert self.seen.v is not None
            memory.values = last_of(memory.values, self.seen.v, n_key).detach().clone()
        memory.texts, memory.n_key, memory.at_slots = self.texts, n_key, self.at_slots
