"""What the hooks of a layer know in a running pass: its vectors, its positions, and the text that it continues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from tl_posdisent.hooks.edits.cached_text import Positions, TextSoFar, before_and_now, last_of
from tl_posdisent.hooks.edits.layer_plan import Grouped, LayerPlan, can_rescore, grouped
from tl_posdisent.hooks.edits.rotation_edits import HeadRotation
from tl_posdisent.models.running.kv_cache import WITHOUT_CACHE


@dataclass(frozen=True)
class Vectors:
    """Vectors ``[batch, pos, head, d_head]`` of a pass, before rotation and after any QK-norm; None until seen."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


class LayerState:
    """State of one layer in one forward pass.

    Attributes:
        spec: the layer, with the rotation of the running text.
        plan: how the edits are done.
        start, continues: as in ``ActivePass``.
        text: what was kept of the text that this pass may continue, and then what is kept of it for the next pass.
        vectors, positions: of this pass.
        n_query: number of queries.
        rescored: heads whose scores are recomputed: those of the plan, or all with rotation edits if it ``fell_back``.
        fell_back: whether the running text's rotation table is not the expected one.
        cos: the table of cosines, until that of sines.
        z: the result of the attention before that of edited scores is put in.
        pattern: the pattern, where it comes before ``z``.
    """

    def __init__(self, plan: LayerPlan, text: TextSoFar, start: int, continues: bool) -> None:
        self.plan, self.spec, self.text = plan, plan.spec, text
        self.start, self.continues = start, continues
        self.vectors, self.positions, self.n_query = Vectors(), Positions(), 0
        self.rescored, self.fell_back = plan.rescored, False
        self.cos: Tensor | None = None
        self.z: Tensor | None = None
        self.pattern: Tensor | None = None

    # --- vectors, those in the KV cache included

    @property
    def queries(self) -> Tensor:
        assert self.vectors.q is not None
        return self.vectors.q

    @property
    def texts(self) -> int:
        return 1 if self.vectors.q is None else len(self.vectors.q)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.vectors.q is None else self.vectors.q.dtype

    def queries_and_keys(self, heads: Sequence[int], n_key: int) -> tuple[Tensor, Tensor]:
        """Return unrotated queries and keys of some heads, one key head for each query head."""
        k = self._whole(self.keys(n_key), n_key)
        return self.queries[:, :, list(heads)], k[:, :, [self.spec.key_head(h) for h in heads]]

    def keys(self, n_key: int) -> Tensor:
        """Return the unrotated keys, of the last ``n_key`` as many as are known."""
        assert self.vectors.k is not None
        return last_of(self.text.keys, self.vectors.k, n_key)

    def values(self, n_key: int) -> Tensor:
        """Return the values of all keys."""
        assert self.vectors.v is not None
        return self._whole(last_of(self.text.values, self.vectors.v, n_key), n_key)

    def _whole(self, x: Tensor, n_key: int) -> Tensor:
        if x.shape[1] != n_key:
            self.refuse_part(n_key)
        return x

    # --- positions

    @property
    def own(self) -> Tensor:
        """The model's own positions of the queries, once they are known."""
        assert self.positions.own is not None
        return self.positions.own

    @property
    def expected(self) -> Tensor:
        """Default positions of the queries: 0, 1, 2 …, or those that continue a cached text."""
        return torch.arange(self.start, self.start + self.n_query, device=self.queries.device)

    @property
    def cached(self) -> int:
        """Number of tokens of the text in the KV cache, if this pass may continue it, otherwise 0."""
        return self.text.seen if self.text.texts == self.texts else 0

    def places(self, n_key: int) -> tuple[Tensor, Tensor]:
        """Return the model's own positions of queries and keys."""
        return self.own, before_and_now(self.own, n_key, self.text.positions.own)

    def edited_places(self, n_key: int) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys for edits, from 0 at the first token of each text."""
        if not self.positions.from_counts:
            return self.places(n_key)
        query, key = self.counts(n_key)
        return query.clamp_min(0), key.clamp_min(0)

    def counts(self, n_key: int) -> tuple[Tensor, Tensor]:
        """Return the indices of queries and keys in their text."""
        counted = self.positions.counted
        assert counted is not None
        return counted, before_and_now(counted, n_key, self.text.positions.counted)

    def part(self, n_key: int) -> tuple[int, int] | None:
        """Return the slots (padding included) of the first query and the first key if the text is run in parts."""
        if n_key == self.n_query and not self.continues:
            return None
        n_slots = self.n_query + (self.text.seen if n_key > self.n_query else 0)
        return n_slots - self.n_query, n_slots - n_key

    # --- what is done

    @property
    def misplaced(self) -> bool:
        """Whether vectors were turned for other positions than the model's, so that their scores are recomputed."""
        return self.fell_back and self.plan.turned_before

    @property
    def edits_scores(self) -> bool:
        return bool(self.rescored or self.plan.score_edits)

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
        """Group the heads whose scores must be known by the edits that the model has already applied.

        The model applies edits of tables and turned vectors itself. Scores that are recomputed take no part in that,
        but for the tables, which act on all heads; after a fall-back, tables were left as they are.
        """
        rescored = {head for some in self.rescored.values() for head in some}
        read = {h for edit, heads in self.plan.score_edits if edit.vectors or pattern for h in heads}
        if cached or not self.spec.cos or (pattern and self.plan.by_place):
            read |= self.plan.heads
        now = HeadRotation() if self.fell_back else self.plan.table
        wanted = sorted(rescored | read)
        return grouped((head, now if head in rescored else self.plan.rotations[head]) for head in wanted)

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
        if cached and not self.text.holds(self.texts, cached, self.spec.window):
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

    def extended_text(self, n_key: int) -> TextSoFar:
        """Return what the next pass needs if it continues this text, which it can only with a KV cache."""
        later = n_key > self.n_query
        if not (later or self.continues):
            return TextSoFar()
        before = self.text if later else TextSoFar()
        keys, values, k = None, None, self.vectors.k
        if k is not None:  # all are needed to recompute scores, or to compare a pattern
            every = self.plan.reads_vectors or self.spec.scores is None or self.fell_back
            keys = (self.keys(n_key) if every else k[:, -1:]).detach().clone()
        if self.spec.scores is None and self.edits_scores:
            values = self.values(n_key).detach().clone()
        positions = before.continued_by(self.positions) if later else self.positions
        return TextSoFar(self.texts, n_key, before.seen + self.n_query, positions, self.misplaced, keys, values)
