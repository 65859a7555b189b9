"""One attention layer under edits: what is done at its hooks in one forward pass (how, says ``layer_plan``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from tl_posdisent.hooks.edits import running_positions as text
from tl_posdisent.hooks.edits.layer_plan import Grouped, LayerPlan, grouped
from tl_posdisent.hooks.edits.rotated_scores import rotated_scores, rotated_vectors
from tl_posdisent.hooks.edits.rotation_and_score_edits import (
    FrequencyLimit,
    HeadRotation,
    Order,
    Side,
    View,
    check_patch,
    masked_softmax,
)
from tl_posdisent.models.capture import spread_rows
from tl_posdisent.models.kv_cache import WITHOUT_CACHE, check_cache_is_kept, tokens_before
from tl_posdisent.models.reading.spec import Tap, masked_below
from tl_posdisent.rope.rotary import turn
from tl_posdisent.utils.precision import mismatch, no_autocast

_ROWS_CHECKED = 8
_FITTED = (Order.REPLACE, Order.COMPONENT)  # edits that fit a text's scores


class LayerPass:
    """One layer in one forward pass, with the mask and positions of the running text."""

    def __init__(self, plan: LayerPlan, memory: text.CachedText) -> None:
        self.plan, self.spec, self.memory = plan, plan.spec, memory
        self.first = ""  # the hook that begins a pass
        self.seen: set[str] = set()
        self.held: dict[str, Tensor] = {}
        self.rescored = plan.rescored
        self.own: Tensor | None = None  # positions of the queries, as the model has them
        self.counted: Tensor | None = None  # which tokens of their text they are, whatever their positions
        self.texts, self.n_query, self.dtype = 1, 0, torch.float32
        self.start: int | None = None  # tokens in the model's own cache, where it is needed before the hooks show it

    @no_autocast()
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
        check_cache_is_kept(self.spec.layer, x.shape[1])
        for edit, heads in self.plan.result_edits:
            at = torch.tensor(heads, device=x.device)
            x = x.index_copy(2, at, edit.replace(self.spec.layer, heads, x[:, :, at]).to(x.dtype))
        return x

    def _at_keys(self, x: Tensor) -> None:
        """The pattern of heads whose result alone is replaced."""
        n_query, n_key = x.shape[-2:]
        check_cache_is_kept(self.spec.layer, n_query, n_key, self.spec.window)

    # --- what is seen before the rotation

    def _at_q(self, x: Tensor) -> None:
        vectors = self.held["q"] = self._read(self.spec.q, x, self.spec.n_heads)
        self.texts, self.n_query, self.dtype = len(vectors), vectors.shape[1], vectors.dtype
        if self._turned_before or not self.plan.editable:
            self.start = tokens_before(self.spec.layer)

    def _at_k(self, x: Tensor) -> None:
        self.held["k"] = self._read(self.spec.k, x, self.spec.n_kv_heads)

    def _at_v(self, x: Tensor) -> None:
        assert self.spec.v is not None
        self.held["v"] = self.spec.v.read(x)
        self.n_query = self.n_query or self.held["v"].shape[1]

    def _read(self, tap: Tap | None, x: Tensor, n: int) -> Tensor:
        assert tap is not None
        vectors = tap.read(x)
        if vectors.shape[2:] != (n, self.spec.d_head):
            heads, size = vectors.shape[2:]
            raise ValueError(
                f"{tap.name} has {heads} heads of size {size}, and {n} of {self.spec.d_head} when the hooks were made: "
                "make the hooks anew after changing the model"
            )
        return vectors

    @property
    def cached(self) -> int:
        """Tokens of the text in the KV cache, if this pass goes on with it."""
        return self.memory.seen if self.memory.texts == self.texts else 0

    @property
    def expected(self) -> Tensor:
        """Positions that the queries have unless something else shows: 0, 1, 2 …, or the next of a cached text."""
        start = self.start
        if start is None:
            start = self.cached if self.n_query == 1 else 0
        return torch.arange(start, start + self.n_query, device=self.held["q"].device)

    # --- the rotation

    @property
    def _moves(self) -> bool:
        """Whether some edit needs to know where the vectors stand."""
        return any(self.plan.rotations) or self.plan.reads_vectors

    @property
    def _turned_before(self) -> bool:
        """Whether vectors are turned at a hook before the rotation, where the running table is still to come."""
        before = self.spec.turn_q is not None and self.spec.q is not None and self.spec.turn_q.name == self.spec.q.name
        turned = [*self.plan.turned_q, *self.plan.turned_k]
        return before and any(each.of_positions or each.noise or each.patched for each in turned)

    @property
    def _fell_back(self) -> bool:
        """Whether scores are recomputed that the plan would not have recomputed."""
        return self.rescored != self.plan.rescored

    @property
    def _misplaced(self) -> bool:
        """Whether vectors were turned for other positions than the model's, so that their scores are recomputed."""
        return self._fell_back and self._turned_before

    def _at_cos(self, x: Tensor) -> Tensor | None:
        self.held["cos"] = x
        if self._moves:
            self.own = text.positions_from_table(
                x, self.spec.require_rotary("rotation edits"), self.expected, self.cached
            )
            self._fall_back_elsewhere()
        return self._exchanged(x, "cos")

    def _at_sin(self, x: Tensor) -> Tensor | None:
        cos = self.held.pop("cos")
        if self._moves and self.own is None:
            self._measure(cos, x)
        return self._exchanged(x, "sin")

    def _measure(self, cos: Tensor, sin: Tensor) -> None:
        """Go on with the rotation of the running text, where it is another than was read from the model."""
        read = self.spec.require_rotary("rotation edits")
        rotary = text.measured_rotary(cos, sin, read)
        self.own = None if rotary is None else text.positions_from_table(cos, rotary, self.expected, self.cached)
        if rotary is None or self.own is None:
            self._refuse_rotation()
        for edit in {edit for rotation in self.plan.rotations for edit in rotation.edits}:
            if isinstance(edit, FrequencyLimit):
                edit.check(read, rotary, self.spec.layer)
        self.spec = replace(self.spec, rotary=rotary)
        if self._turned_before or self.plan.table:
            self._rescore()

    def _fall_back_elsewhere(self) -> None:
        """Recompute scores where vectors were turned for other positions than the model's, and from then on."""
        if self._turned_before and self.own is not None:
            before = self.memory.given is not None and self.expected[0] > 0
            if before or not torch.equal(self.own, self.expected):
                self._rescore()

    def _refuse_rotation(self) -> NoReturn:
        raise ValueError(
            f"the rotation table of layer {self.spec.layer} is not that of positions 0, 1, 2 … nor of any others "
            "that this model is known to use: run it on a whole text, unpadded, without position_ids or KV cache, and "
            "make the hooks anew if its tables have changed"
        )

    def _rescore(self) -> None:
        """Recompute the scores of all edited heads instead."""
        if not (self.plan.editable or (self.spec.v and self.spec.z and self.spec.pattern)):
            raise ValueError(
                f"the rotation table of layer {self.spec.layer} is not that of positions 0, 1, 2 …, and its scores "
                "cannot be recomputed: run the model without padding, position_ids or a KV cache"
            )
        self.rescored = grouped((head, rotation) for head, rotation in enumerate(self.plan.rotations) if rotation)

    def _exchanged(self, x: Tensor, which: Any) -> Tensor | None:
        table, rotary = self.plan.table, self.spec.rotary
        if not table or rotary is None or self.own is None or self._fell_back:
            return None
        return table.table(x, self.own, rotary, which, self.texts)

    def _at_turn_q(self, x: Tensor) -> Tensor | None:
        return self._turn(x, self.spec.turn_q, self.spec.q, "q", self.plan.turned_q)

    def _at_turn_k(self, x: Tensor) -> Tensor | None:
        return self._turn(x, self.spec.turn_k, self.spec.k, "k", self.plan.turned_k)

    def _turn(self, x: Tensor, tap: Tap | None, plain: Tap | None, which: Side, turned: Grouped) -> Tensor | None:
        assert tap is not None
        vectors, behind = tap.read(x), plain is not None and tap.name != plain.name
        if self._moves and behind and not self.spec.cos and which == "q":
            heads = sorted(self.plan.heads)  # other lists of hooks may have turned the others
            rotary, before = self.spec.require_rotary("rotation edits"), self.held["q"][:, :, heads]
            self.own = text.positions_from_vectors(before, vectors[:, :, heads], rotary, self.expected, self.cached)
            if self.own is None:  # a model without hooks for its tables
                self._refuse_rotation()
        if not turned or self._fell_back:
            return None
        own = self.expected if self.own is None else self.own
        if which == "k":
            own = text.before_and_now(own, vectors.shape[1], self.memory.places)
        for rotation, heads in turned.items():
            at = torch.tensor(heads, device=vectors.device)
            some = self._turned_on(vectors[:, :, at], rotation, heads, which, own, behind).to(vectors.dtype)
            vectors = some if len(heads) == tap.n_heads else vectors.index_copy(2, at, some)
        if not behind:
            self.held[f"given {which}"] = vectors
        return tap.write(vectors)

    def _turned_on(
        self, x: Tensor, rotation: HeadRotation, heads: list[int], which: Side, own: Tensor, behind: bool
    ) -> Tensor:
        """Vectors of some heads as they have to be at the hook."""
        rotary = self.spec.require_rotary("turning")
        given = rotation.patch(which)
        if given is None:
            return rotation.turned_on(x, which, own, rotary, tables=bool(self.plan.table))
        check_patch(f"{which}_rot", given, x)
        given = rotation.kept(given[:, :, heads].to(x.device), rotary, which)
        if behind:
            return given
        table = self.plan.table  # in float64, or what is turned and turned back would not be the same
        angles = table.angles(rotary, table.places(which, own, len(x)))
        return turn(given.double(), -angles[..., None, :], rotary.pairing, 1 / rotary.attention_factor)

    # --- scores

    @property
    def _edits(self) -> bool:
        return bool(self.rescored or self.plan.score_edits)

    @property
    def _puts_in(self) -> bool:
        """Whether the result of edited scores is put in at ``hook_z``."""
        return self._edits and not self.plan.editable

    def _at_scores(self, x: Tensor) -> Tensor | None:
        self.n_query, n_key = x.shape[-2:]
        cached = n_key > self.n_query
        new: Tensor | None = None
        if not self.plan.editable:
            self.held["scores"] = x
        self._check_cache(n_key)
        if self._edits or self.own is None or cached:  # else nothing depends on the mask
            inside, real = text.inside_mask(self.spec, x <= masked_below(x.dtype, self.dtype))
            self._count(n_key, inside, real)
            if self._edits or cached:
                self._compare(x, inside)
            if self._edits and self.plan.editable:
                new = self._edited(x, inside)
        if not self._puts_in:
            self._remember(n_key)
        return new

    def _count(self, n_key: int, inside: Tensor, real: Tensor) -> None:
        """Numbers of the queries, where they are needed, and their positions where nothing but the mask shows them."""
        if self.plan.counts:
            before = self.memory.counted if n_key > self.n_query else None
            self.counted = text.counted_in_text(inside, real, before)
        if self.own is None:
            self.own = text.positions_from_mask(real) + n_key - self.n_query
            if self._turned_before and not bool((self.own == self.expected).expand(real.shape)[real].all()):
                self._rescore()

    def _at_z(self, x: Tensor) -> Tensor | None:
        if not self._edits:
            return None
        self.held["z"] = x
        self._check_values()
        if "scores" in self.held:
            scores = self.held.pop("scores")
            inside, _ = text.inside_mask(self.spec, scores <= masked_below(scores.dtype, self.dtype))
        else:
            at = torch.arange((self.start or 0) + self.n_query, device=x.device)  # the pattern may be still to come
            self.counted = at[-self.n_query :]
            inside, self.own = (
                self.spec.sees(self.counted[:, None] - at),
                self.counted if self.own is None else self.own,
            )
            wanted = self.rescored or self.plan.recomputes
            scores = self._own_scores(len(at)) if wanted else x.new_zeros(len(x), self.spec.n_heads, *inside.shape)
        n_key = scores.shape[-1]
        pattern = masked_softmax(self._edited(scores, inside), inside)
        # Of other heads, whose vectors are turned, the model's own result is right, and scores may not be known.
        heads = sorted({h for _, some in [*self.rescored.items(), *self.plan.score_edits] for h in some})
        values = self._known("v", n_key)[:, :, [self.spec.key_head(h) for h in heads]]
        mixed = torch.einsum("bhqk,bkhd->bqhd", pattern[:, heads], values.to(pattern.dtype))
        if self.spec.scores is not None or "pattern" in self.held:
            self._remember(n_key)
        return x.index_copy(2, torch.tensor(heads, device=x.device), mixed.to(x.dtype))

    def _check_values(self) -> None:
        """What heads gather must be their pattern times ``hook_v``, or it could not be put together anew."""
        if not {"z", "pattern"} <= set(self.held):
            return
        z, pattern = (self.held[name].detach().double() for name in ("z", "pattern"))
        v = self._known("v", pattern.shape[-1]).detach().double()
        rows, heads = spread_rows(z.shape[1], _ROWS_CHECKED, z.device), sorted(self.plan.heads)
        values, z = v[:, :, [self.spec.key_head(head) for head in heads]], z[:, rows][:, :, heads]
        ours = torch.einsum("bhqk,bkhd->bqhd", pattern[:, heads][:, :, rows], values)
        if ours.shape != z.shape or mismatch(z, ours, self.held["z"].dtype) > 1:
            raise ValueError(
                f"layer {self.spec.layer} of {self.spec.architecture} discards edited scores, and its hook_z is not "
                "its pattern times hook_v (values are normalised or gated in between): its scores cannot be changed"
            )

    def _own_scores(self, n_key: int) -> Tensor:
        """The scores of a model that does not show them, under the rotation edits that it has taken in."""
        q, own = self.held["q"], self._places(n_key)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.new_zeros(len(q), self.spec.n_heads, self.n_query, n_key, dtype=wide)
        for rotation, heads in self._alike(range(self.spec.n_heads)):
            if rotation not in self.rescored:
                scores[:, heads] = rotated_scores(self.spec, rotation, heads, *self._vectors(heads, n_key), own)
        return scores

    def _alike(self, heads: Iterable[int]) -> Iterable[tuple[HeadRotation, list[int]]]:
        """Heads by the edits of their rotation."""
        return grouped((head, self.plan.rotations[head]) for head in heads).items()

    def _at_pattern(self, x: Tensor) -> None:
        """Where a model shows its pattern alone: check that its mask and positions are those of a text without padding,
        whole or going on with a cached one."""
        n_key = x.shape[-1]
        at = torch.arange(n_key, device=x.device)
        places = at[n_key - self.n_query :]
        if self.spec.scores is None and self.own is None:
            self.own = places
            if self._turned_before and n_key > 1 and not torch.equal(places, self.expected):
                self._refuse_part(n_key)  # too late for scores: the result may have passed
        if self._edits:
            if "z" in self.held and self.spec.scores is None and (self.start or 0) + self.n_query != n_key:
                self._refuse_part(n_key)
            self.held["pattern"] = x
            self._check_values()
        if self.spec.scores is not None:
            return
        self._check_cache(n_key)
        if self._edits or any(self.plan.rotations):
            self._compare(x, self.spec.sees(places[:, None] - at), pattern=True)
        if not self._puts_in or "z" in self.held:
            self._remember(n_key)

    def _edited(self, x: Tensor, inside: Tensor) -> Tensor:
        """The layer's scores under all edits; outside the mask they stay."""
        x, n_key, own = x.clone(), x.shape[-1], self._places(x.shape[-1])
        for rotation, heads in self.rescored.items():
            before = None if self.spec.scores is None else x[:, heads]
            new = rotated_scores(self.spec, rotation, heads, *self._vectors(heads, n_key), own, before)
            x[:, heads] = torch.where(_some(inside, heads), new.to(x.dtype), x[:, heads])
        for edit, chosen in self.plan.score_edits:
            if not edit.cached:
                self._check_whole(n_key, edit.tool)
            if n_key == 1 and edit.order == Order.COMPONENT:
                continue  # one score is its own mean
            if edit.order in _FITTED and not edit.cached:
                text.check_one_text(self.spec, _some(inside, chosen), edit.tool)
            for rotation, heads in self._alike(chosen) if edit.vectors else [(HeadRotation(), list(chosen))]:
                before = x[:, heads]
                left = _some(inside, heads) & (before != -torch.inf)
                vectors = self._vectors(heads, n_key) if edit.vectors else None
                counted = self._counted(n_key) if edit.counts else None
                view = View(self.spec, heads, left, rotation, own, counted, before, vectors)
                x[:, heads] = torch.where(left, edit.edit(view).to(x.dtype), before)
        return x

    def _places(self, n_key: int) -> tuple[Tensor, Tensor]:
        """The model's own positions of queries and keys."""
        assert self.own is not None
        return self.own, text.before_and_now(self.own, n_key, self.memory.places)

    def _counted(self, n_key: int) -> tuple[Tensor, Tensor]:
        """Which tokens of their text queries and keys are."""
        assert self.counted is not None
        return self.counted, text.before_and_now(self.counted, n_key, self.memory.counted)

    def _vectors(self, heads: Sequence[int], n_key: int) -> tuple[Tensor, Tensor]:
        """Unrotated queries and keys of some heads, a key head for each query head."""
        q, k = self.held["q"], self._known("k", n_key)
        return q[:, :, list(heads)], k[:, :, [self.spec.key_head(h) for h in heads]]

    # --- the cache

    def _last(self, which: str, n_key: int) -> Tensor:
        """Unrotated keys ("k"), keys as they were turned ("given k") or values ("v"), the last of ``n_key``: as many
        as are known."""
        now = self.held[which if which in self.held else "k"]
        before = {"k": self.memory.keys, "given k": self.memory.given, "v": self.memory.values}[which]
        known = now if before is None or now.shape[1] >= n_key else torch.cat([before, now], 1)
        return known[:, -n_key:]  # a sliding window forgets the first

    def _known(self, which: str, n_key: int) -> Tensor:
        """The same of all keys, or a refusal."""
        x = self._last(which, n_key)
        if x.shape[1] != n_key:
            self._refuse_part(n_key)
        return x

    def _check_whole(self, n_key: int, tool: str = "") -> None:
        if n_key != self.n_query:
            self._refuse_part(n_key, tool)

    def _refuse_part(self, n_key: int, tool: str = "") -> NoReturn:
        raise ValueError(
            f"{tool}{': ' * bool(tool)}layer {self.spec.layer} sees {self.n_query} queries against {n_key} keys: "
            f"{WITHOUT_CACHE}"
        )

    def _check_cache(self, n_key: int) -> None:
        """Keys and values in a cache come from earlier passes: these must have been under the same interventions."""
        check_cache_is_kept(self.spec.layer, self.n_query, n_key, self.spec.window)
        cached = n_key - self.n_query if self.n_query else 0
        if cached and (given := next((e for r in self.plan.rotations for e in r.edits if e.slots), None)):
            raise ValueError(
                f"{given.tool} was given for each slot of a whole text, and layer {self.spec.layer} sees "
                f"{self.n_query} queries against {n_key} keys: give {given.by_position} for a KV cache, "
                f"or {WITHOUT_CACHE}"
            )
        window = self.spec.window is not None and min(self.memory.n_key, self.spec.window - 1) <= cached
        if cached and (self.memory.texts != self.texts or (self.memory.n_key != cached and not window)):
            self._refuse_cache(n_key)

    def _refuse_cache(self, n_key: int) -> NoReturn:
        raise ValueError(
            f"layer {self.spec.layer} sees {self.n_query} queries against {n_key} keys, of which the KV cache was "
            f"not filled under these hooks: fill and use it in one model.hooks block, or {WITHOUT_CACHE}"
        )

    def _remember(self, n_key: int) -> None:
        """Keep what the next pass needs to know if it goes on with this text."""
        continued = n_key > self.n_query
        self.memory.places = text.so_far(self.memory.places, self.own, continued=continued)
        self.memory.counted = text.so_far(self.memory.counted, self.counted, continued=continued)
        self.memory.seen = self.n_query + (self.memory.seen if continued else 0)
        if "k" in self.held:
            needed = (
                self.plan.reads_vectors or self.spec.scores is None or self._misplaced
            )  # a pattern is compared whole
            keys = self._last("k", n_key) if needed else self.held["k"][:, -1:]
            given = self._last("given k", n_key).detach().clone() if self._misplaced else None
            self.memory.keys, self.memory.given = keys.detach().clone(), given
        if self._puts_in:
            self.memory.values = self._last("v", n_key).detach().clone()
        self.memory.texts, self.memory.n_key = self.texts, n_key

    def _compare(self, x: Tensor, inside: Tensor, *, pattern: bool = False) -> None:
        """Recompute some rows of the model's own scores: they must be what vectors, rotation and cached keys give."""
        n_key, cached = x.shape[-1], x.shape[-1] > self.n_query
        if self.spec.problem is not None or "q" not in self.held:
            return
        # Vectors that were turned for other positions are what the model then rotated.
        queries = self.held.get("given q", self.held["q"]) if self._misplaced else self.held["q"]
        keys = self._last("given k" if self._misplaced else "k", n_key).detach()
        own, n_key = self._places(n_key), keys.shape[1]
        rows = spread_rows(self.n_query, _ROWS_CHECKED, x.device)
        for rotation, heads in self._done(pattern, cached):
            if cached and rotation.patched:
                continue
            q, k = queries[:, :, heads].detach(), keys[:, :, [self.spec.key_head(h) for h in heads]]
            q_rot, k_rot = rotated_vectors(self.spec, rotation, heads, q, k, (own[0], own[1][..., -n_key:]))
            ours = self.spec.score(q_rot[:, rows], k_rot)
            theirs, seen = x[:, heads][:, :, rows, -n_key:].detach(), _some(inside, heads)[..., rows, -n_key:]
            if pattern:
                ours, seen = masked_softmax(ours, seen), torch.ones_like(seen)
            seen = seen.expand(theirs.shape)
            turned = text.rounding(self.spec.rotary, own[0]) if self.spec.rotary else 0.0
            slack = turned * float(q_rot.norm(dim=-1).amax() * k_rot.norm(dim=-1).amax()) * self.spec.require_scale()
            if mismatch(theirs[seen], ours[seen], self.dtype, slack) <= 1:
                continue
            if cached:
                self._refuse_cache(x.shape[-1])
            self.spec.check_length(x.shape[-1], "interventions that recompute scores")
            raise ValueError(
                f"scores of layer {self.spec.layer} of {self.spec.architecture} are not what its queries, keys and "
                "rotation give: padding, positions or tables that hooks cannot see here, or other hooks act on its "
                "attention; run the model on whole, unpadded texts without them"
            )

    def _done(self, pattern: bool, cached: bool) -> Iterable[tuple[HeadRotation, list[int]]]:
        """Heads whose scores must be known, by the edits that the model has taken in so far."""
        rescored = {head for some in self.rescored.values() for head in some}
        read = {h for edit, heads in self.plan.score_edits if edit.vectors or pattern for h in heads}
        if cached or not self.spec.cos:
            read |= self.plan.heads
        now = HeadRotation() if self._fell_back else self.plan.table
        wanted = sorted(rescored | read)
        return grouped((head, now if head in rescored else self.plan.rotations[head]) for head in wanted).items()


def _some(inside: Tensor, heads: Sequence[int]) -> Tensor:
    return inside[:, list(heads)] if inside.ndim == 4 and inside.shape[1] > 1 else inside
