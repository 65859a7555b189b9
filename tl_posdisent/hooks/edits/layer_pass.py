"""Carry out the plan of one attention layer in one forward pass, with the mask and positions of the running text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.hooks.edits import running_positions as text
from tl_posdisent.hooks.edits.layer_plan import LayerPlan
from tl_posdisent.hooks.edits.rotated_scores import rotated_scores, rotated_vectors
from tl_posdisent.hooks.edits.rotation import FrequencyLimit, HeadRotation, Side, check_patch
from tl_posdisent.hooks.edits.scores import Order, ScoreEdit, View, masked_softmax
from tl_posdisent.models.reading.spec import Tap, masked_below
from tl_posdisent.models.reading.tolerance import mismatch, spread_rows
from tl_posdisent.rope.rotary import Rotary, turn, unrotate

_ROWS_CHECKED = 8
_FITTED = (Order.REPLACE, Order.COMPONENT)  # edits that fit a text's scores
_NO_CACHE = "run the model on whole texts, without a KV cache (generate with use_past_kv_cache=False)"


@dataclass
class CachedText:
    """What is known of the text in the KV cache: its shape, and its unrotated keys where scores are recomputed."""

    texts: int = 0
    n_key: int = 0  # keys in the cache
    seen: int = 0  # tokens so far, of which a sliding window may have forgotten some
    keys: Tensor | None = None
    last: Tensor | None = None  # the last key, unrotated: by it one knows the text again


class LayerPass:
    """One layer in one forward pass."""

    def __init__(self, plan: LayerPlan, memory: CachedText) -> None:
        self.plan, self.spec, self.memory = plan, plan.spec, memory
        self.first = ""  # the hook that begins a pass
        self.seen: set[str] = set()
        self.held: dict[str, Tensor] = {}
        self.rescored = dict(plan.rescored)
        self.own: Tensor | None = None  # positions of the queries, as the model has them
        self.unread = False  # the rotation of this text is not the one that was read from the model
        self.texts, self.n_query, self.dtype = 1, 0, torch.float32

    def see(self, name: str, x: Tensor) -> Tensor | None:
        """What is done at one hook; None leaves its tensor as it is."""
        self.first = self.first or name
        self.seen.add(name)
        new: Tensor | None = None
        for role in self.plan.roles[name]:
            changed = getattr(self, f"_at_{role}")(x if new is None else new)
            new = new if changed is None else changed
        return new

    def _at_result(self, x: Tensor) -> Tensor:
        """Heads replaced at ``hook_z``, whatever was recomputed there before."""
        for edit, heads in self.plan.result_edits:
            at = torch.tensor(heads, device=x.device)
            x = x.index_copy(2, at, edit.replace(self.spec.layer, heads, x[:, :, at]).to(x.dtype))
        return x

    # --- what is seen before the rotation

    def _at_q(self, x: Tensor) -> None:
        assert self.spec.q is not None
        vectors = self.spec.q.read(x)
        self._check_heads(vectors, self.spec.n_heads, self.spec.q)
        self.texts, self.n_query, self.dtype = len(vectors), vectors.shape[1], vectors.dtype
        self.held["q"] = vectors

    def _at_k(self, x: Tensor) -> None:
        assert self.spec.k is not None
        vectors = self.spec.k.read(x)
        self._check_heads(vectors, self.spec.n_kv_heads, self.spec.k)
        self.held["k"] = vectors

    def _at_v(self, x: Tensor) -> None:
        assert self.spec.v is not None
        self.held["v"] = self.spec.v.read(x)
        self.n_query = self.n_query or self.held["v"].shape[1]

    def _check_heads(self, vectors: Tensor, n: int, tap: Tap) -> None:
        if vectors.shape[2:] != (n, self.spec.d_head):
            heads, size = vectors.shape[2:]
            raise ValueError(
                f"{tap.name} has {heads} heads of size {size}, and {n} of {self.spec.d_head} when the hooks were made: "
                "make the hooks anew after changing the model"
            )

    @property
    def expected(self) -> Tensor:
        """Positions that the queries have unless something else shows: 0, 1, 2 …, or the next of a cached text."""
        start = self.memory.seen if self.n_query == 1 and self.memory.texts == self.texts else 0
        return torch.arange(start, start + self.n_query, device=self.held["q"].device)

    # --- the rotation

    @property
    def _moves(self) -> bool:
        """Whether some edit needs to know where the vectors stand."""
        return any(self.plan.rotations) or self.plan.reads_vectors

    def _at_cos(self, x: Tensor) -> Tensor | None:
        self.held["cos"] = x
        if self._moves:
            assert self.spec.rotary is not None
            self.own = text.positions_from_table(x, self.spec.rotary, self.expected)
        return self._exchanged(x, "cos")

    def _at_sin(self, x: Tensor) -> Tensor | None:
        cos, spec = self.held.pop("cos"), self.spec
        if self._moves and self.own is None:
            self.unread = True
            assert spec.rotary is not None
            rotary = text.measured_rotary(cos, x, spec.rotary)
            self._use(rotary, text.positions_from_table(cos, rotary, self.expected) if rotary else None)
        elif self._moves and self._turned_before and not self._as_expected():
            self._rescore()
        return self._exchanged(x, "sin")

    def _use(self, rotary: Rotary | None, own: Tensor | None) -> None:
        """Go on with the rotation of the running text, where it is another than was read from the model."""
        plan = self.plan
        if rotary is not None and own is not None:
            for edit in {edit for rotation in plan.rotations for edit in rotation.edits}:
                if isinstance(edit, FrequencyLimit):
                    edit.check(self.spec.require_rotary(edit.tool), rotary, self.spec.layer)
            self.spec, self.own = replace(self.spec, rotary=rotary), own
            if self._turned_before or (plan.table and not plan.table.only_frozen):
                self._rescore()
        elif plan.rescored or plan.turned_q or plan.turned_k or plan.reads_vectors or not plan.table.only_frozen:
            raise ValueError(
                f"the rotation table of layer {self.spec.layer} is not that of positions 0, 1, 2 … nor of any others "
                "that this model is known to use: run it on a whole text, unpadded, without position_ids or KV cache"
            )

    @property
    def _turned_before(self) -> bool:
        """Whether vectors are turned at a hook before the rotation, where the running table is still to come."""
        before = self.spec.turn_q is not None and self.spec.q is not None and self.spec.turn_q.name == self.spec.q.name
        turned = [*self.plan.turned_q, *self.plan.turned_k]
        return before and any(each.of_positions or each.noise or each.patched for each in turned)

    def _as_expected(self) -> bool:
        return self.own is not None and self.own.shape == self.expected.shape and torch.equal(self.own, self.expected)

    def _rescore(self) -> None:
        """Recompute the scores of all edited heads instead."""
        if not (self.plan.editable or (self.spec.v and self.spec.z and self.spec.pattern)):
            raise ValueError(
                f"the rotation table of layer {self.spec.layer} is not that of positions 0, 1, 2 …, and its scores "
                "cannot be recomputed: run the model without padding, position_ids or a KV cache"
            )
        self.rescored = {}
        for head, rotation in enumerate(self.plan.rotations):
            if rotation:
                self.rescored.setdefault(rotation, []).append(head)

    def _exchanged(self, x: Tensor, which: Any) -> Tensor | None:
        table, rotary = self.plan.table, self.spec.rotary
        if not table or rotary is None or (self.own is None and not table.only_frozen):
            return None
        if self.unread and not table.only_frozen:
            return None
        own = self.expected if self.own is None else self.own
        return table.table(x, own, rotary, which, self.texts)

    def _at_turn_q(self, x: Tensor) -> Tensor | None:
        assert self.spec.turn_q is not None
        return self._turn(x, self.spec.turn_q, self.spec.q, "q", self.plan.turned_q)

    def _at_turn_k(self, x: Tensor) -> Tensor | None:
        assert self.spec.turn_k is not None
        return self._turn(x, self.spec.turn_k, self.spec.k, "k", self.plan.turned_k)

    def _turn(
        self, x: Tensor, tap: Tap, plain: Tap | None, which: Side, turned: dict[HeadRotation, list[int]]
    ) -> Tensor | None:
        vectors, behind = tap.read(x), plain is not None and tap.name != plain.name
        if which == "k" and behind:
            self.held["k_rot"] = vectors
        if self._moves and behind and not self.spec.cos and which == "q":
            self._find(vectors)
        if not turned or (self.rescored and self.rescored != self.plan.rescored):
            return None
        own = self.expected if self.own is None else self.own
        if which == "k":
            own = text.before_and_now(own, vectors.shape[1])
        for rotation, heads in turned.items():
            at = torch.tensor(heads, device=vectors.device)
            some = self._turned_on(vectors[:, :, at], rotation, heads, which, own, behind)
            vectors = (
                some.to(vectors.dtype) if len(heads) == tap.n_heads else vectors.index_copy(2, at, some.to(vectors))
            )
        return tap.write(vectors)

    def _find(self, q_rot: Tensor) -> None:
        """The positions of a model that has no hooks for its tables, from what it did to its queries."""
        heads = sorted(self.plan.heads)  # other lists of hooks may have turned the others
        spec, before, q_rot = self.spec, self.held["q"][:, :, heads], q_rot[:, :, heads]
        assert spec.rotary is not None
        self.own = text.positions_from_vectors(before, q_rot, spec.rotary, self.expected)
        if self.own is None:
            self.unread = True
            rotary = text.measured_from_vectors(before, q_rot, spec.rotary)
            self._use(rotary, text.positions_from_vectors(before, q_rot, rotary, self.expected) if rotary else None)

    def _turned_on(
        self, x: Tensor, rotation: HeadRotation, heads: list[int], which: Side, own: Tensor, behind: bool
    ) -> Tensor:
        """Vectors of some heads as they have to be at the hook."""
        rotary = self.spec.require_rotary("turning")
        given = rotation.patch(which)
        if given is None:
            return rotation.turned_on(x, which, own, rotary, tables=bool(self.plan.table))
        check_patch(f"{which}_rot", given, x)
        given = given[:, :, heads].to(x.device)
        if behind:
            return given
        table = self.plan.table  # in float64, or what is turned and turned back would not be the same
        angles = table.angles(rotary, table.places(which, own, len(x)))
        return turn(given.double(), -angles[..., None, :], rotary.pairing, 1 / rotary.attention_factor)

    # --- scores

    def _at_scores(self, x: Tensor) -> Tensor | None:
        if not self.plan.editable:
            self.held["scores"] = x
        self._check_cache(x.shape[-1])
        if not self._edits and self.own is not None and x.shape[-1] == x.shape[-2]:  # nothing depends on the mask
            self._remember(x.shape[-1])
            return None
        inside, real = text.inside_mask(self.spec, x <= masked_below(x.dtype, self.dtype))
        if self.own is None and self._turned_before and not self._counted_as_expected(x.shape[-1], real):
            self._rescore()
        own = self._positions(x.shape[-1], real)
        if x.shape[-1] > x.shape[-2]:
            self._check_last_key(x, inside, own)
        if not self._edits:
            self._remember(x.shape[-1])
            return None
        self._compare(x, inside, own)
        new = self._edited(x, inside, own) if self.plan.editable else None
        self._remember(x.shape[-1])
        return new

    @property
    def _edits(self) -> bool:
        return bool(self.rescored or self.plan.score_edits)

    def _at_z(self, x: Tensor) -> Tensor | None:
        if not self._edits:
            return None
        self.held["z"] = x
        self._check_values()
        if "scores" in self.held:
            scores = self.held.pop("scores")
            inside, real = text.inside_mask(self.spec, scores <= masked_below(scores.dtype, self.dtype))
        else:
            at = torch.arange(self.n_query, device=x.device)
            inside, real = self.spec.sees(at[:, None] - at), torch.ones(len(x), self.n_query, dtype=torch.bool)
            wanted = self.rescored or any(edit.scores for edit, _ in self.plan.score_edits)
            scores = self._own_scores() if wanted else x.new_zeros(len(x), self.spec.n_heads, *inside.shape)
        own = self._positions(scores.shape[-1], real.to(x.device))
        pattern = masked_softmax(self._edited(scores, inside, own), inside)
        heads = sorted({*(h for some in self.rescored.values() for h in some), *self._score_heads()})
        v = self.held["v"]
        at = torch.tensor(heads, device=x.device)
        if v.shape[1] != pattern.shape[-1]:
            raise ValueError(f"layer {self.spec.layer} sees cached keys: {_NO_CACHE}")
        values = v[:, :, torch.tensor([self.spec.key_head(h) for h in heads], device=v.device)]
        mixed = torch.einsum("bhqk,bkhd->bqhd", pattern[:, at], values.to(pattern.dtype))
        return x.index_copy(2, at, mixed.to(x.dtype))

    def _check_values(self) -> None:
        """What heads gather must be their pattern times ``hook_v``, or it could not be put together anew."""
        if not {"z", "pattern"} <= set(self.held):
            return
        z, pattern, v = (self.held[name].detach().double() for name in ("z", "pattern", "v"))
        if pattern.shape[-1] != v.shape[1] or pattern.shape[-2] != z.shape[1]:
            raise ValueError(f"layer {self.spec.layer} sees cached keys: {_NO_CACHE}")
        rows, heads = spread_rows(z.shape[1], _ROWS_CHECKED, z.device), sorted(self.plan.heads)
        values, z = v[:, :, [self.spec.key_head(head) for head in heads]], z[:, rows][:, :, heads]
        ours = torch.einsum("bhqk,bkhd->bqhd", pattern[:, heads][:, :, rows], values)
        if ours.shape != z.shape or mismatch(z, ours, self.held["z"].dtype) > 1:
            raise ValueError(
                f"layer {self.spec.layer} of {self.spec.architecture} discards edited scores, and its hook_z is not "
                "its pattern times hook_v (values are normalised or gated in between): its scores cannot be changed"
            )

    def _score_heads(self) -> Iterator[int]:
        for _, heads in self.plan.score_edits:
            yield from heads

    def _own_scores(self) -> Tensor:
        """The scores of a model that does not show them, under all rotation edits."""
        q, k = self.held["q"], self.held["k"]
        if k.shape[1] != self.n_query:
            raise ValueError(f"layer {self.spec.layer} does not show its scores: {_NO_CACHE}")
        own = torch.arange(self.n_query, device=q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.new_zeros(len(q), self.spec.n_heads, self.n_query, self.n_query, dtype=wide)
        for rotation, heads in self._alike(range(self.spec.n_heads)):
            pair = self._vectors(heads, self.n_query, (own, own))
            if not rotation:
                scores[:, heads] = self.spec.score(*(self.spec.rotated(x.to(wide), own) for x in pair))
            elif rotation not in self.rescored:
                scores[:, heads] = rotated_scores(self.spec, rotation, heads, *pair, (own, own))
        return scores

    def _alike(self, heads: Iterable[int]) -> Iterable[tuple[HeadRotation, list[int]]]:
        """Heads by the edits of their rotation."""
        groups: dict[HeadRotation, list[int]] = {}
        for head in heads:
            groups.setdefault(self.plan.rotations[head], []).append(head)
        return groups.items()

    def _at_pattern(self, x: Tensor) -> None:
        """Where a model shows its pattern alone: check that its mask and positions are those of a whole text."""
        if self._edits:
            self.held["pattern"] = x
            self._check_values()
        if self.spec.scores is not None:
            return
        self._check_cache(x.shape[-1])
        if self.n_query != x.shape[-1] and self._edits:
            raise ValueError(
                f"layer {self.spec.layer} sees {self.n_query} queries against {x.shape[-1]} keys: {_NO_CACHE}"
            )
        if self.n_query == x.shape[-1] and (self._edits or any(self.plan.rotations)):
            at = torch.arange(self.n_query, device=x.device)
            inside = self.spec.sees(at[:, None] - at)
            self._compare(x, inside, (at, at), pattern=True)
        self._remember(x.shape[-1])

    def _edited(self, x: Tensor, inside: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
        """The layer's scores under all edits; outside the mask they stay."""
        x = x.clone()
        for rotation, heads in self.rescored.items():
            at = torch.tensor(heads, device=x.device)
            q, k = self._vectors(heads, x.shape[-1], own)
            before = None if self.spec.scores is None else x[:, at]
            new = rotated_scores(self.spec, rotation, heads, q, k, own, before)
            x[:, at] = torch.where(_some(inside, at), new.to(x.dtype), x[:, at])
        for edit, chosen in self.plan.score_edits:
            if x.shape[-1] != x.shape[-2] and not edit.cached:
                raise ValueError(
                    f"{edit.tool}: layer {self.spec.layer} sees {x.shape[-2]} queries against {x.shape[-1]} keys: "
                    f"{_NO_CACHE}"
                )
            if x.shape[-1] == 1 and edit.order == Order.COMPONENT:
                continue  # one score is its own mean
            if edit.order in _FITTED:
                self._check_one_text(_some(inside, torch.tensor(list(chosen), device=x.device)), edit.tool)
            for rotation, heads in self._alike(chosen) if edit.vectors else [(HeadRotation(), list(chosen))]:
                self._edit(x, edit, rotation, heads, inside, own)
        return x

    def _check_one_text(self, inside: Tensor, tool: str) -> None:
        """Scores are fitted text by text: several texts packed into a row, each masked from the others, are not one."""
        if inside.shape[-1] != inside.shape[-2]:
            return
        at = torch.arange(inside.shape[-1], device=inside.device)
        real = inside.diagonal(0, -2, -1)
        whole = self.spec.sees(at[:, None] - at) & real[..., :, None] & real[..., None, :]
        if not torch.equal(whole, inside):
            raise ValueError(
                f"attention_mask must leave one text in each row for {tool}, got a mask that hides tokens of a text "
                "from each other, as of packed texts: pass them as a batch of texts"
            )

    def _edit(
        self,
        x: Tensor,
        edit: ScoreEdit,
        rotation: HeadRotation,
        heads: list[int],
        inside: Tensor,
        own: tuple[Tensor, Tensor],
    ) -> None:
        at = torch.tensor(heads, device=x.device)
        before = x[:, at]
        left = _some(inside, at) & (before != -torch.inf)
        vectors = self._vectors(heads, x.shape[-1], own) if edit.vectors else None
        view = View(self.spec, heads, left, rotation, own, lambda: before, vectors)
        x[:, at] = torch.where(left, edit.edit(view).to(x.dtype), before)

    def _positions(self, n_key: int, real: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of queries and keys."""
        if self.own is None:
            self.own = self._counted(n_key, real)
        return self.own, text.before_and_now(self.own, n_key)

    def _counted_as_expected(self, n_key: int, real: Tensor) -> bool:
        return bool((self._counted(n_key, real) == self.expected).expand(real.shape)[real].all())

    def _counted(self, n_key: int, real: Tensor) -> Tensor:
        """Positions of the queries where nothing but the mask shows them."""
        return text.positions_from_mask(real) + (n_key - self.n_query if self.n_query else 0)

    def _vectors(self, heads: Sequence[int], n_key: int, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Unrotated queries and keys of some heads, a key head for each query head."""
        q = self.held["q"]
        k = self._keys(n_key, own[1])
        groups = [self.spec.key_head(h) for h in heads]
        return q[:, :, torch.tensor(heads, device=q.device)], k[:, :, torch.tensor(groups, device=k.device)]

    def _keys(self, n_key: int, own: Tensor) -> Tensor:
        k = self.held["k"]
        if k.shape[1] == n_key:
            return k
        k_rot = self.held.get("k_rot")
        if k_rot is not None and k_rot.shape[1] == n_key:  # HookedTransformer caches keys before rotation
            return unrotate(k_rot, own, self.spec.require_rotary("recomputed scores"))
        if self.memory.keys is not None and self.memory.keys.shape[1] + k.shape[1] >= n_key:
            return torch.cat([self.memory.keys, k], 1)[:, -n_key:]  # a sliding window forgets the first
        raise ValueError(f"layer {self.spec.layer} sees {self.n_query} queries against {n_key} keys: {_NO_CACHE}")

    def _check_cache(self, n_key: int) -> None:
        """Keys and values in a cache come from earlier passes: these must have been under the same interventions."""
        cached = n_key - self.n_query if self.n_query else 0
        if not cached:
            return
        window = self.spec.window is not None and min(self.memory.n_key, self.spec.window - 1) <= cached
        if self.memory.texts != self.texts or (self.memory.n_key != cached and not window):
            self._refuse_cache(n_key)

    def _check_last_key(self, x: Tensor, inside: Tensor, own: tuple[Tensor, Tensor]) -> None:
        """The last cached key must be that of the pass before: its score shows it."""
        last, (q_at, k_at), cached = self.memory.last, own, x.shape[-1] - self.n_query
        if last is None or self.spec.problem is not None or self.rescored != self.plan.rescored:
            return
        rescored = {head for some in self.rescored.values() for head in some}
        for rotation, heads in self._alike(sorted(self.plan.heads)):
            done = HeadRotation() if set(heads) <= rescored else rotation
            if done.patched or (done.position is not None and done.position.slots):
                continue
            key = last[:, :, [self.spec.key_head(h) for h in heads]]
            at = q_at, k_at[..., cached - 1 : cached]
            ours = self.spec.score(
                *rotated_vectors(self.spec, done, heads, self.held["q"][:, :, heads].detach(), key, at)
            )
            theirs, seen = (each[:, heads, :, cached - 1 : cached] for each in (x.detach(), inside.expand(x.shape)))
            if mismatch(theirs[seen], ours[seen], self.dtype) > 1:
                self._refuse_cache(x.shape[-1])

    def _refuse_cache(self, n_key: int) -> None:
        raise ValueError(
            f"layer {self.spec.layer} sees {self.n_query} queries against {n_key} keys, of which the KV cache was "
            f"not filled under these hooks: fill and use it in one model.hooks block, or {_NO_CACHE}"
        )

    def _remember(self, n_key: int) -> None:
        """Keep what the next pass needs to know if it goes on with this text."""
        continued = n_key > self.n_query
        self.memory.seen = self.n_query + (self.memory.seen if continued else 0)
        self.memory.texts, self.memory.n_key = self.texts, n_key
        self.memory.last = self.held["k"][:, -1:].detach().clone() if "k" in self.held else None
        k_rot = self.held.get("k_rot")
        if self.plan.reads_vectors and (k_rot is None or k_rot.shape[1] == self.n_query):
            self.memory.keys = self._keys(n_key, self.expected).detach().clone()

    def _compare(self, x: Tensor, inside: Tensor, own: tuple[Tensor, Tensor], *, pattern: bool = False) -> None:
        """Recompute some rows of the model's own scores: they must be what its vectors and its rotation give."""
        fallen_back = self.rescored != self.plan.rescored
        before = self.spec.turn_q is not None and self.spec.q is not None and self.spec.turn_q.name == self.spec.q.name
        checked: list[tuple[HeadRotation, list[int]]] = []
        if self.rescored and not (fallen_back and self._turned_before):
            heads = sorted(head for some in self.rescored.values() for head in some)
            checked.append((HeadRotation() if fallen_back else self.plan.table, heads))
        if before and not self.spec.cos and not fallen_back:
            checked += self.plan.turned_q.items()
        from_vectors = [h for edit, heads in self.plan.score_edits if edit.vectors or pattern for h in heads]
        done = {head for some in self.rescored.values() for head in some}
        checked += [x for x in self._alike(sorted(set(from_vectors) - done)) if x not in checked]
        if self.spec.problem is not None or not (self.held.get("q") is not None and checked):
            return
        k = self.held["k"] if pattern or not self.rescored else self._keys(x.shape[-1], own[1])
        n_key = k.shape[1]
        own = own[0], own[1][..., -n_key:]
        rows = spread_rows(self.n_query, _ROWS_CHECKED, x.device)
        for rotation, heads in checked:
            q = self.held["q"][:, :, heads].detach()
            keys = k[:, :, [self.spec.key_head(h) for h in heads]].detach()
            q_rot, k_rot = rotated_vectors(self.spec, rotation, heads, q, keys, own)
            ours = self.spec.score(q_rot[:, rows], k_rot)
            at = torch.tensor(heads, device=x.device)
            theirs, seen = x[:, at][:, :, rows, -n_key:].detach(), _some(inside, at)[..., rows, -n_key:]
            if pattern:
                ours, seen = masked_softmax(ours, seen), torch.ones_like(seen)
            seen = seen.expand(theirs.shape)
            if mismatch(theirs[seen], ours[seen], self.dtype) > 1:
                self.spec.check_length(x.shape[-1], "interventions that recompute scores")
                raise ValueError(
                    f"scores of layer {self.spec.layer} of {self.spec.architecture} are not what its queries, keys and "
                    "rotation give: padding, positions or tables that hooks cannot see here, or other hooks act on its "
                    "attention; run the model on whole, unpadded texts without them"
                )


def _some(inside: Tensor, heads: Tensor) -> Tensor:
    return inside[:, heads] if inside.ndim == 4 and inside.shape[1] > 1 else inside
