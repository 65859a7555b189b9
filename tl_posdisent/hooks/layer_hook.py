"""Edit one attention layer in a forward pass: its scores, by adding the difference that edits make, and its results.

A model that shows no scores discards edited ones too: its result is computed from them and put in at ``hook_z``.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.hooks.edit import Edit, Head, NewScores, View
from tl_posdisent.hooks.edited_pattern import EditedRows, edited_rows
from tl_posdisent.hooks.rotated_scores import Vectors, rotated_scores
from tl_posdisent.models.agreement import (
    check_pattern,
    check_product,
    check_result,
    product_rounding,
    real_tokens,
)
from tl_posdisent.models.capture import of_heads
from tl_posdisent.models.patterns import masked_softmax
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.models.running.results import by_heads
from tl_posdisent.utils.errors import ArgumentError

Scores = Float[Tensor, "batch head query key"]
Cells = Bool[Tensor, "batch head query key"]


class LayerHook:
    """The records of a layer's heads, and what its hooks have shown so far in the pass that is running.

    Attributes:
        spec: the layer.
        records: what is edited in each head.
        names: the hooks that it needs, in the order in which they fire.
        running: a copy of the layer for the pass that is under way, which keeps what was ``seen`` in it.
    """

    def __init__(self, spec: AttentionSpec, records: Mapping[int, Edit]) -> None:
        self.spec, self.records = spec, dict(sorted(records.items()))
        self.heads = [head for head, record in self.records.items() if record.edits_scores]
        self.tools = sorted({call.partition("(")[0] for x in self.records.values() for call in x.call_names})
        self._check_layer()
        self.lent, self.names = self._needed()
        self.own = [name for name in self.names if name not in self.lent]
        self.seen: dict[str, Tensor] = {}
        self.edited: EditedRows | None = None
        self.running: LayerHook | None = None
        self.thread = 0  # of the pass
        self.ended: set[int] = set()  # threads whose pass was ended by that of another

    @property
    def pairs(self) -> list[Head]:
        """The layer and each of the heads that are edited."""
        return [(self.spec.layer, head) for head in self.records]

    # --- what is needed

    @property
    def shows_scores(self) -> bool:
        return self.spec.taps.scores is not None

    @property
    def at_scores(self) -> str | None:
        """The hook at which scores are edited: that of the scores or, in a model that shows none, of the result."""
        return (self.spec.taps.scores or self.spec.taps.z) if self.heads else None

    @property
    def at_result(self) -> str | None:
        edited = any(record.z for record in self.records.values())
        return (self.spec.taps.z or hook_name(self.spec.layer, "hook_z")) if edited else None

    def changed_at(self, name: str) -> list[Head]:
        """Return the heads that a hook changes."""
        scores, results = name == self.at_scores, name == self.at_result
        changed = (head for head, x in self.records.items() if (scores and x.edits_scores) or (results and x.z))
        return [(self.spec.layer, head) for head in changed]

    @property
    def by_slot(self) -> bool:
        """Whether results are edited at slots of a whole text."""
        return any(record.z is not None and record.z.by_slot for record in self.records.values())

    @cached_property
    def recomputed(self) -> list[int]:
        """Heads whose scores must be the product of queries and keys, where they are one in this layer."""
        return self.heads if self.spec.limits.problem is None else []

    def _needed(self) -> tuple[frozenset[str], list[str]]:
        """Return the hooks of an earlier layer whose keys and values this one attends to, and all hooks in order."""
        taps, names = self.spec.taps, [self.at_scores, self.at_result]
        taps_read: list[Tap | None] = [taps.q, taps.k] if self.recomputed else []
        if self.heads and not self.shows_scores:
            taps_read += [taps.v, taps.gate]
        names += [taps.pattern or taps.scores] if self.heads else [taps.scores or taps.pattern]  # also to count passes
        needed = {*names, *(name for tap in taps_read if tap for name in tap.names)}
        fired = {name: place for place, name in enumerate(self.spec.points)}
        lent = [taps.k, taps.v] if self.heads and taps.keys_of is not None else []
        return (
            frozenset(tap.name for tap in lent if tap),
            sorted((name for name in needed if name), key=lambda name: fired.get(name, len(fired))),
        )

    def _check_layer(self) -> None:
        """Refuse a layer that lacks the hooks for its edits."""
        spec = self.spec
        if not self.heads:
            return
        if why := spec.why_no_score_edits:
            raise ValueError(
                f"layer {spec.layer} of {spec.architecture} {why}: edit its results (ablate_heads), or load the model "
                "with the other backend"
            )
        vectors = any(record.scores and record.scores.vectors for record in self.records.values())
        if vectors or not self.shows_scores or any(record.rotation for record in self.records.values()):
            spec.require_scale()

    # --- the pass

    def __call__(self, name: str, x: Tensor) -> Tensor | None:
        """Keep what a hook shows, edit the layer if it is the hook for that, and forget the pass at its last hook."""
        running = self._pass(name)
        new = running._at(name, x)
        if name == self.own[-1] and self.running is running:
            self.running = None
        return new

    def _pass(self, name: str) -> LayerHook:
        """Return the pass to which a hook belongs, which begins with the layer's first; refuse several threads.

        A thread that is refused ends the pass of the other, too: it may have been interrupted long ago.
        """
        running, begins = self.running, name == self.own[0] or name in self.lent
        thread = threading.get_ident()
        met = running is not None and running.thread != thread
        if met or (thread in self.ended and not begins):
            if running is not None:
                self.ended.add(running.thread)
            if self.running is running:
                self.running = None
            raise ValueError(
                f"hooks of {' + '.join(self.tools)} got passes of several threads at once in layer {self.spec.layer}, "
                "and one must end before another begins: run the model in one thread"
            )
        if running is None or name == self.own[0]:
            # of a pass that was interrupted, only keys of earlier layers may be left
            left = {} if running is None else {each: running.seen[each] for each in self.lent & running.seen.keys()}
            running = copy.copy(self)
            running.seen, running.edited, running.thread = left, None, thread
            self.running = running
            self.ended.discard(thread)
        return running

    def _at(self, name: str, x: Tensor) -> Tensor | None:
        """Keep what a hook shows, and edit the layer if it is the hook for that."""
        if name in self.lent:
            self.seen[name] = x
            return None
        self._check_order(name)
        self.seen[name] = x
        new = None
        if name == self.at_scores:
            new = self._edited_scores() if self.shows_scores else self._edited_result(x)
        if name == self.spec.taps.pattern and self.edited is not None:
            self.edited.check(self.spec, x)
        cells = self.spec.taps.scores or self.spec.taps.pattern
        if self.by_slot and name == cells:  # it may fire behind the result
            self._check_whole_text(x)
        if name == self.at_result:
            new = self._new_results(x if new is None else new)
        if name == self.own[-1] and self.heads and not self.shows_scores:
            self._check_hidden()
        return new

    def _check_order(self, name: str) -> None:
        """Refuse a layer of which a hook fired before others, or twice."""
        if self.lent - self.seen.keys():
            raise ValueError(
                f"hooks of {' + '.join(self.tools)} act on layer {self.spec.layer}, which attends to the keys of "
                f"layer {self.spec.taps.keys_of}, and do not see these: run the model from its first layer on"
            )
        if [each for each in self.own if each in self.seen] != self.own[: self.own.index(name)]:
            raise ValueError(
                f"hooks of {' + '.join(self.tools)} do not see layer {self.spec.layer} from its beginning, or see it "
                "twice: apply them once, and run the model outside of its own hooks"
            )

    def _vectors(self, tap: Tap | None) -> Float[Tensor, "batch pos h size"]:
        assert tap is not None
        return tap.read(*(self.seen[name] for name in tap.names))

    def _queries_and_keys(self) -> Vectors:
        """Return queries and keys before rotation, in the model's dtype."""
        return Vectors(self._vectors(self.spec.taps.q), self._vectors(self.spec.taps.k))

    # --- scores

    def _edited_scores(self) -> Scores:
        """Return the scores under all edits, of a layer that shows them; remember some rows for the pattern."""
        scores = self.seen[self.at_scores or ""]
        self._check_whole_text(scores)
        new = self._new_scores(scores, None)
        self.edited = edited_rows(self.heads, scores, new, every=not self.recomputed)
        return new

    def _new_scores(self, scores: Scores, vectors: Vectors | None) -> Scores:
        """Edit heads alike at a time."""
        spec, rest = self.spec, None
        if self.recomputed:
            vectors = vectors or self._queries_and_keys()
            own = vectors.of_heads(spec, self.recomputed).wide().rotated(spec)
            rounding = product_rounding(spec, *own, scores.dtype, vectors.q.dtype)
            rest = own.add_product(spec, of_heads(scores, self.recomputed).to(own.q.dtype, copy=True), -1)
            hidden = check_product(spec, rest, rounding)
        else:
            hidden = spec.is_masked(of_heads(scores, self.heads))
        groups: dict[object, list[int]] = {}
        for head in self.heads:
            groups.setdefault(self.records[head].key, []).append(head)
        new = scores
        for heads in groups.values():
            at = [self.heads.index(head) for head in heads]
            beyond = None if rest is None else of_heads(rest, at)
            changed = self._of_group(heads, of_heads(scores, heads), beyond, of_heads(hidden, at), vectors)
            new = _with_heads(new, heads, changed, own=new is not scores)
        return new

    def _of_group(
        self, heads: list[int], scores: Scores, rest: Scores | None, hidden: Cells, vectors: Vectors | None
    ) -> Scores:
        """Return the scores of heads that share a record.

        Args:
            scores: the model's own.
            rest: these less the product of queries and keys.
            hidden: the keys that a query does not see.
            vectors: queries and keys of all heads.
        """
        record = self.records[heads[0]]
        if record.from_start:
            self._check_start(record.from_start, ~hidden)
        if record.rotation:
            assert rest is not None
            assert vectors is not None
            scores = rotated_scores(self.spec, record, heads, scores, rest, hidden, vectors.wide())
        if not record.hide and not record.scores:
            return scores
        visible = ~hidden
        real = real_tokens(visible)
        shown = visible
        if record.hide:
            more = self._hidden_by(record, scores)
            shown = visible & ~more
            blind = ~shown.any(-1)
            self._check_keys_left(record, blind & real)
            scores = torch.where(blind[..., None], scores, scores.masked_fill(more, -torch.inf))
        if record.scores:
            inside = self._mask_of_texts(record.calls["scores"], visible & real[..., None], real)
            scores = self._replaced(record.scores, heads, scores, inside & shown if record.hide else inside, vectors)
        return scores

    def _hidden_by(self, record: Edit, scores: Scores) -> Bool[Tensor, "*lead query key"]:
        """Return the keys that an edit hides."""
        hidden = torch.zeros((), dtype=torch.bool, device=scores.device)
        for each in record.hide:
            cells = each.cells(len(scores), scores.shape[-1], scores.device)
            hidden = hidden | (cells[:, None] if cells.ndim == 3 else cells)
        return hidden

    def _replaced(
        self,
        edit: NewScores,
        heads: list[int],
        scores: Scores,
        inside: Bool[Tensor, "*lead query key"],
        vectors: Vectors | None,
    ) -> Scores:
        """Replace the scores inside the mask; outside, only queries without keys, which are padding, keep theirs."""
        own = None
        if edit.vectors:
            assert vectors is not None
            own = vectors.q[:, :, heads], vectors.k[:, :, [self.spec.key_head(head) for head in heads]]
        new = edit.of(View(self.spec, heads, inside.expand_as(scores), scores, own))
        if new is scores:
            return scores
        new = torch.where(inside.expand_as(scores), new.to(scores.dtype), -torch.inf)
        real = inside.any(-1, keepdim=True)
        return new if bool(real.all()) else torch.where(real, new, scores)

    # --- what a pass must be

    def _check_whole_text(self, cells: Scores) -> None:
        """Refuse scores or a pattern of a text that is run in parts, with a KV cache."""
        n_query, n_key = cells.shape[-2:]
        if n_query < n_key or n_query == 1:
            raise ValueError(
                f"hooks act on whole texts of two or more tokens, and layer {self.spec.layer} has {n_query} queries "
                f"for {n_key} keys: run the model without a KV cache, also without a static one (generate with "
                "use_past_kv_cache=False)"
            )

    def _check_start(self, call: str, visible: Cells) -> None:
        """Refuse what counts from a text's beginning in rows where that is ambiguous.

        A text begins where a query sees none of the keys before it that the layer's own mask shows: behind padding on
        the left, or behind another text of the row.
        """
        earlier = self.spec.mask(visible.shape[-1], visible.device).tril(-1)
        sees_earlier = visible.tril(-1).any(-1) | ~real_tokens(visible)  # beyond its window, too, under another mask
        begins = ~sees_earlier.any(1) & earlier.any(-1)
        if bool(begins.any()):
            row, token = begins.nonzero()[0].tolist()
            raise ArgumentError(
                "attention_mask",
                f"must not hide the first keys of a row for {call.partition('(')[0]}, got such a mask in row {row} of "
                f"layer {self.spec.layer}, where token {token} sees none before it, so that the positions of tokens "
                "are ambiguous: pad on the right, or run each text alone",
            )

    def _check_keys_left(self, record: Edit, blind: Bool[Tensor, "batch head query"]) -> None:
        """Refuse an edit that hides the last key that a query of a text sees: a softmax without keys has no meaning."""
        if bool(blind.any()):
            tools = " and ".join(dict.fromkeys(each.call.partition("(")[0] for each in record.hide))
            raise ValueError(
                f"{tools} must leave each query a key, and in layer {self.spec.layer} query "
                f"{int(blind.nonzero()[0, -1])} would see none, with what other edits and the model's mask hide: hide "
                "fewer"
            )

    def _mask_of_texts(
        self, call: str, inside: Cells, real: Bool[Tensor, "batch 1 pos"]
    ) -> Bool[Tensor, "batch 1 query key"]:
        """Return the layer's mask and refuse any other, beside padding: scores are fitted text by text under that."""
        whole = self.spec.mask(inside.shape[-1], inside.device) & real[..., :, None] & real[..., None, :]
        if torch.equal(whole.expand_as(inside), inside):
            return whole
        tool = call.partition("(")[0]
        if bool((inside & ~whole).any()):
            query, key = (inside & ~whole).nonzero()[0, -2:].tolist()
            raise ArgumentError(
                "attention_mask",
                f"must not show keys that layer {self.spec.layer} hides for {tool}, got a mask by which token {query} "
                f"sees token {key}, as in the two-way prefix of a prefix LM: give texts without a prefix",
            )
        raise ArgumentError(
            "attention_mask",
            f"must leave one text in each row for {tool}, got a mask that hides tokens of a text from each other: "
            "pass packed texts as a batch of texts",
        )

    # --- models that neither show scores nor use edited ones

    def _edited_result(self, z: Tensor) -> Tensor:
        """Return z with the attention of edited heads put in, for a text without padding."""
        spec, vectors = self.spec, self._queries_and_keys()
        scores = spec.score(*vectors.wide().rotated(spec))
        self._check_whole_text(scores)
        inside = spec.mask(scores.shape[-1], scores.device)
        scores = self._new_scores(scores.masked_fill(~inside, -torch.inf), vectors)[:, self.heads]
        pattern = masked_softmax(scores, inside)
        return z.index_copy(2, torch.tensor(self.heads, device=z.device), self._gathered(pattern).to(z.dtype))

    def _gathered(self, pattern: Float[Tensor, "batch _ query key"]) -> Float[Tensor, "batch query _ size"]:
        """Compute z of the edited heads from their patterns."""
        spec, keys = self.spec, [self.spec.key_head(head) for head in self.heads]
        gate = None if spec.taps.gate is None else self._vectors(spec.taps.gate)[:, :, self.heads]
        return spec.gathered(pattern, self._vectors(spec.taps.v)[:, :, keys], gate)

    def _check_hidden(self) -> None:
        """Compare what the edits relied on with pattern and result, once both are seen, in whichever order."""
        spec, pattern = self.spec, self.seen[self.spec.taps.pattern or ""].detach()
        self._check_whole_text(pattern)
        vectors = self._queries_and_keys()
        q_rot, k_rot = vectors.of_heads(spec, self.heads).wide().rotated(spec)
        shown = pattern[:, self.heads]
        check_pattern(spec, q_rot, k_rot, shown, vectors.q.dtype)
        z = self.seen[spec.taps.z or ""].detach()[:, :, self.heads]
        check_result(spec, z, self._gathered(shown.double()).detach())

    # --- results

    def _new_results(self, z: Tensor) -> Tensor:
        """Return z with the output of some heads replaced."""
        new = by_heads(z, self.spec.n_heads)
        groups: dict[object, list[int]] = {}
        for head, record in self.records.items():
            if record.z:
                groups.setdefault(id(record.z), []).append(head)
        for heads in groups.values():
            edit = self.records[heads[0]].z
            assert edit is not None
            at = torch.tensor(heads, device=z.device)
            new = new.index_copy(2, at, edit.of(self.spec.layer, heads, new[:, :, at]).to(z.dtype))
        return new.reshape(z.shape)


def _with_heads(scores: Scores, heads: Sequence[int], new: Tensor, *, own: bool) -> Scores:
    """Put in the scores of some heads, in place if they are this pass's ``own``."""
    if len(heads) == scores.shape[1]:
        return new
    at = torch.tensor(list(heads), device=scores.device)
    return scores.index_copy_(1, at, new.to(scores.dtype)) if own else scores.index_copy(1, at, new.to(scores.dtype))
