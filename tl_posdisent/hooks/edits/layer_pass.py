"""Edit one attention layer in one forward pass. ``layer_plan.py`` decides how each edit is done.

The steps, each at its own hook (``Step``), in the order in which most models compute:

1. *queries* before rotation are stored; from here on, the number of texts and tokens is known.
2. *keys* before rotation are stored.
3. *cosines*: the positions of the running text are read from its rotation table, and the table is replaced.
4. *sines*: the table is replaced. If its frequencies differ from those that were read, they are measured.
5. *queries are turned*. If the model shows no tables, positions are read from what the rotation does to the queries.
6. *keys are turned*.
7. *scores*: the mask is read; the model's scores are compared with what was read from the model, and edited.
8. *values* are stored, if the model shows no scores,
9. and the result of edited scores is *put in* at ``hook_z``.
10. *pattern*: checked, since it alone shows the mask of such a model.
11. *result*: the output of heads is replaced at ``hook_z``, regardless of their attention.

If the running text's positions are not the expected ones (padding, ``position_ids``, a KV cache), vectors may have been
turned for the wrong positions. Then the pass *falls back*: it recomputes the scores of all heads with rotation edits.
So it does if the mask shows padding before a text and the model's positions count it: an edit starts each text at 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NoReturn

import torch
from torch import Tensor

from tl_posdisent.hooks.edits import running_positions as text
from tl_posdisent.hooks.edits.agreement import check_result, check_scores
from tl_posdisent.hooks.edits.cached_text import Positions, TextSoFar, before_and_now
from tl_posdisent.hooks.edits.layer_plan import LayerPlan, Step
from tl_posdisent.hooks.edits.layer_state import LayerState
from tl_posdisent.hooks.edits.recomputed_scores import edited_scores, own_scores, result_of
from tl_posdisent.hooks.edits.rotation_edits import FrequencyLimit, Side
from tl_posdisent.hooks.edits.turned_vectors import turned_vectors
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.spec import masked_below
from tl_posdisent.utils.precision import no_autocast


class LayerPass:
    """Carry out a layer's edits in one forward pass."""

    def __init__(self, plan: LayerPlan, text: TextSoFar, start: int, continues: bool) -> None:
        self.plan, self.state = plan, LayerState(plan, text, start, continues)
        self.fired: dict[str, None] = {}  # hooks that have fired, in order

    @no_autocast()
    def at(self, name: str, x: Tensor) -> Tensor | None:
        """Run the steps of one hook and return its new tensor, or None to leave it unchanged."""
        self.fired[name] = None
        new: Tensor | None = None
        for step in self.plan.steps[name]:
            changed = _DONE_AT[step](self.state, x if new is None else new)
            new = new if changed is None else changed
        return new


# --- 1, 2: queries and keys before the rotation


def _queries(state: LayerState, x: Tensor) -> None:
    state.vectors = replace(state.vectors, q=_read(state, state.spec.q, x, state.spec.n_heads))
    state.n_query = state.queries.shape[1]


def _keys(state: LayerState, x: Tensor) -> None:
    state.vectors = replace(state.vectors, k=_read(state, state.spec.k, x, state.spec.n_kv_heads))


def _read(state: LayerState, tap: Tap | None, x: Tensor, n: int) -> Tensor:
    assert tap is not None
    vectors = tap.read(x)
    if vectors.shape[2:] != (n, state.spec.d_head):
        heads, size = vectors.shape[2:]
        raise ValueError(
            f"{tap.name} has {heads} heads of size {size}, and {n} of {state.spec.d_head} when the hooks were made: "
            "make the hooks again after changing the model"
        )
    return vectors


# --- 3, 4: the rotation tables


def _cosines(state: LayerState, x: Tensor) -> Tensor | None:
    state.cos = x
    if state.plan.needs_positions:
        rotary = state.spec.require_rotary("rotation edits")
        _set_own(state, text.positions_from_table(x, rotary, state.expected, state.cached))
        _fall_back_elsewhere(state)
    return _exchanged(state, x, "cos")


def _sines(state: LayerState, x: Tensor) -> Tensor | None:
    cos, state.cos = state.cos, None
    if state.positions.own is None and state.plan.needs_positions:
        assert cos is not None
        _measure_rotation(state, cos, x)
    return _exchanged(state, x, "sin")


def _set_own(state: LayerState, own: Tensor | None) -> None:
    state.positions = replace(state.positions, own=own)


def _measure_rotation(state: LayerState, cos: Tensor, sin: Tensor) -> None:
    """Switch to the rotation of the running text if it differs from the one read from the model."""
    read = state.spec.require_rotary("rotation edits")
    rotary = text.measured_rotary(cos, sin, read)
    if rotary is None:
        _refuse_rotation(state)
    _set_own(state, text.positions_from_table(cos, rotary, state.expected, state.cached))
    if state.positions.own is None:
        _refuse_rotation(state)
    for edit in {edit for rotation in state.plan.rotations for edit in rotation.edits}:
        if isinstance(edit, FrequencyLimit):
            edit.check(read, rotary, state.spec.layer)
    state.spec = replace(state.spec, rotary=rotary)
    if state.plan.turned_before or state.plan.table:
        state.fall_back()


def _fall_back_elsewhere(state: LayerState) -> None:
    """Fall back if vectors were turned for other positions than the model's, or were so earlier in this text."""
    if state.plan.turned_before and state.positions.own is not None:
        before = state.text.misplaced and state.start > 0
        if before or not torch.equal(state.own, state.expected):
            state.fall_back()


def _refuse_rotation(state: LayerState) -> NoReturn:
    end = text.end_of_known(state.expected, state.cached)
    raise ValueError(
        f"the rotation table of layer {state.spec.layer} is not that of positions 0, 1, 2 … nor of any others below "
        f"{end}, which are those that are recognised in a text of this length: run the model on a whole text, "
        f"unpadded, without KV cache and with position_ids below {end}, if any, and make the hooks again if its tables "
        "have changed"
    )


def _exchanged(state: LayerState, x: Tensor, which: Literal["cos", "sin"]) -> Tensor | None:
    table, rotary, own = state.plan.table, state.spec.rotary, state.positions.own
    if not table or rotary is None or own is None or state.fell_back:
        return None
    return table.table(x, own, rotary, which, state.texts)


# --- 5, 6: vectors are turned


def _turn_queries(state: LayerState, x: Tensor) -> Tensor | None:
    tap, plain = state.spec.turn_q, state.spec.q
    assert tap is not None
    if state.plan.needs_positions and not state.spec.cos and plain is not None and tap.name != plain.name:
        heads = sorted(state.plan.heads)  # other lists of hooks may have turned the others
        rotary = state.spec.require_rotary("rotation edits")
        before, after = (vectors[:, :, heads] for vectors in (state.queries, tap.read(x)))
        _set_own(state, text.positions_from_vectors(before, after, rotary, state.expected, state.cached))
        if state.positions.own is None:
            _refuse_rotation(state)
    return _turned(state, x, tap, plain, "q") if state.plan.turned_q else None


def _turn_keys(state: LayerState, x: Tensor) -> Tensor | None:
    return _turned(state, x, state.spec.turn_k, state.spec.k, "k") if state.plan.turned_k else None


def _turned(state: LayerState, x: Tensor, tap: Tap | None, plain: Tap | None, which: Side) -> Tensor | None:
    """Turn vectors of some heads at a hook before or after the model's rotation."""
    assert tap is not None
    if state.fell_back:
        return None
    vectors, behind = tap.read(x), plain is not None and tap.name != plain.name
    own = state.expected if state.positions.own is None else state.own
    if which == "k" and vectors.shape[1] > own.shape[-1]:  # with the keys of a KV cache
        own = before_and_now(own, vectors.shape[1], state.text.positions.own)
    rotary = state.spec.require_rotary("turning")
    return tap.write(turned_vectors(state.plan, rotary, vectors, which, own, behind=behind))


# --- 7: scores


def _scores(state: LayerState, x: Tensor) -> Tensor | None:
    state.n_query, n_key = x.shape[-2:]
    new = None
    state.check_cache(n_key)
    state.positions = _with_slots(state, n_key)
    if _reads_mask(state) or n_key > state.n_query:
        inside, real = text.inside_mask(state.spec, x <= masked_below(x.dtype, state.dtype))
        unseen = state.positions.own is None
        state.positions = _counted(state, n_key, inside, real)
        if state.edits_scores or n_key > state.n_query or unseen:
            check_scores(state, x, inside)
        state.positions = _from_0(state, real)
        if state.edits_scores:
            new = edited_scores(state, x, inside)
    state.text = state.extended_text(n_key)
    return new


def _reads_mask(state: LayerState) -> bool:
    """Say whether something depends on the mask of the running text."""
    own, plan = state.positions.own, state.plan
    return (
        state.edits_scores
        or own is None
        or (state.positions.at_slots and plan.by_place)
        or (plan.needs_positions and text.restarts(own))
    )


def _with_slots(state: LayerState, n_key: int) -> Positions:
    """Find out whether the model's own positions are the slots of the batch, from its beginning."""
    own, cached = state.positions.own, n_key > state.n_query
    if own is None or own.ndim > 1 or (cached and not state.text.positions.at_slots):
        return state.positions
    start = state.text.seen if cached else 0
    slots = torch.arange(start, start + state.n_query, device=own.device)
    return replace(state.positions, at_slots=torch.equal(own, slots))


def _counted(state: LayerState, n_key: int, inside: Tensor, real: Tensor) -> Positions:
    """Count the queries in their text if needed; if only the mask shows their positions, read these from it."""
    found = state.positions
    if state.plan.counts or found.own is None or (state.plan.by_place and found.at_slots):
        before = state.text.positions.counted if n_key > state.n_query else None
        found = replace(found, counted=text.counted_in_text(inside, real, before))
    if found.own is not None:
        if n_key == state.n_query and text.restarts(found.own):
            text.check_packed(found.own, inside, real)
        return found
    assert found.counted is not None
    own = text.positions_of(found.counted)
    if state.plan.turned_before and not bool((own == state.expected).expand(real.shape)[real].all()):
        state.fall_back()
    return replace(found, own=own)


def _from_0(state: LayerState, real: Tensor) -> Positions:
    """Fall back if edits depend on positions and the model's own count the padding before a text."""
    found = state.positions
    if not (state.plan.by_place and found.at_slots):
        return found
    assert found.counted is not None
    shifted = (found.counted != state.own) & (real | (found.counted < 0))  # padding after a text shifts nothing
    if not bool(shifted.any()):
        return found
    state.fall_back()
    return replace(found, from_counts=True)


# --- 8, 9, 10: models that show no scores, and that do not use edited ones


def _values(state: LayerState, x: Tensor) -> None:
    assert state.spec.v is not None
    state.vectors = replace(state.vectors, v=state.spec.v.read(x))
    state.n_query = state.n_query or x.shape[1]


def _put_in(state: LayerState, x: Tensor) -> Tensor | None:
    """Put in the result of edited scores, for a text without padding; the pattern shows later whether it has none."""
    if not state.edits_scores:
        return None
    state.z = x
    at = torch.arange(state.start + state.n_query, device=x.device)
    counted = at[-state.n_query :]
    own = counted if state.positions.own is None else state.own
    state.positions = replace(state.positions, own=own, counted=counted)
    inside = state.spec.sees(counted[:, None] - at)
    if state.rescored or state.plan.recomputes:
        scores = own_scores(state, len(at))
    else:  # the edits do not read scores
        scores = x.new_zeros(len(x), state.spec.n_heads, *inside.shape)
    heads, result = result_of(state, scores, inside)
    if state.pattern is not None:
        check_result(state, state.pattern)
        state.pattern = None
        state.text = state.extended_text(len(at))
    return x.index_copy(2, torch.tensor(heads, device=x.device), result.to(x.dtype))


def _pattern(state: LayerState, x: Tensor) -> None:
    """Check what the edits relied on, in the pattern, the only trace of mask and positions in these models.

    They must be those of a text without padding, either whole or continuing a cached one.
    """
    n_key = x.shape[-1]
    at = torch.arange(n_key, device=x.device)
    places = at[n_key - state.n_query :]
    if state.positions.own is None:
        _set_own(state, places)
        if state.plan.turned_before and n_key > 1 and not torch.equal(places, state.expected):
            state.refuse_part(n_key)
    if state.edits_scores and state.start + state.n_query != n_key:
        state.refuse_part(n_key)
    state.check_cache(n_key)
    if state.edits_scores or state.plan.rotates:
        check_scores(state, x, state.spec.sees(places[:, None] - at), pattern=True)
    if state.edits_scores and state.z is None:  # its hook comes later in some bridges, and does what is left
        state.pattern = x
        return
    if state.edits_scores:
        check_result(state, x)
    state.text = state.extended_text(n_key)


# --- 11: results


def _result(state: LayerState, x: Tensor) -> Tensor:
    for edit, heads in state.plan.result_edits:
        at = torch.tensor(heads, device=x.device)
        x = x.index_copy(2, at, edit.replace(state.spec.layer, heads, x[:, :, at]).to(x.dtype))
    return x


_DONE_AT = {
    Step.QUERIES: _queries,
    Step.KEYS: _keys,
    Step.COSINES: _cosines,
    Step.SINES: _sines,
    Step.TURN_QUERIES: _turn_queries,
    Step.TURN_KEYS: _turn_keys,
    Step.SCORES: _scores,
    Step.VALUES: _values,
    Step.PUT_IN: _put_in,
    Step.PATTERN: _pattern,
    Step.RESULT: _result,
}
