"""Edit one attention layer in one forward pass. ``layer_plan.py`` decides how each edit is done.

The steps, each at its own hook (``Step``), in the order in which most models compute:

1. *queries* before rotation are stored; from here on, the number of texts and tokens is known.
2. *keys* before rotation are stored; with latent attention, the slice that all heads share has been, at its own hook.
3. *cosines*: the positions of the running text are read from its rotation table, and the table is replaced.
4. *sines*: the table is replaced. If its frequencies differ from those that were read, they are measured.
5. *queries are turned*. If the model shows no tables, positions are read from what the rotation does to the queries.
6. *keys are turned*.
7. *scores*: the mask is read; the model's scores are compared with what was read from the model, and edited.
8. *values* are stored, if the model shows no scores,
9. and so is the *gate* that multiplies their sum in some models,
10. and the result of edited scores is *put in* at ``hook_z``.
11. *pattern*: checked, since it alone shows the mask of such a model; in some models it comes before the result.
12. *result*: the output of heads is replaced at ``hook_z``, regardless of their attention.

If the running text's positions are not the expected ones (padding, ``position_ids``, a KV cache), vectors may have been
turned for the wrong positions. Then the pass *falls back*: it recomputes the scores of all heads with rotation edits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NoReturn

import torch
from torch import Tensor

from tl_posdisent.hooks.edits import running_positions as text
from tl_posdisent.hooks.edits.agreement import check_result, check_scores
from tl_posdisent.hooks.edits.cached_text import Positions, TextSoFar, before_and_now
from tl_posdisent.hooks.edits.layer_plan import Step
from tl_posdisent.hooks.edits.layer_state import LayerState, refuse_cache, refuse_part, refuse_start
from tl_posdisent.hooks.edits.recomputed_scores import edited_scores, own_scores, result_of
from tl_posdisent.hooks.edits.rotation_edits import FrequencyLimit, Side
from tl_posdisent.hooks.edits.running_mask import RunningMask, index_in_text, running_mask
from tl_posdisent.hooks.edits.turned_vectors import turned_vectors
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.spec import masked_below
from tl_posdisent.models.running.kv_cache import WITHOUT_CACHE
from tl_posdisent.models.running.results import by_heads
from tl_posdisent.utils.precision import no_autocast

_MARGIN = 0.1  # of the lowest possible score: more than its rounding in any dtype


@no_autocast()
def take_steps(state: LayerState, name: str, x: Tensor) -> Tensor | None:
    """Take the steps of one hook and return its new tensor, or None to leave it unchanged."""
    state.fired[name] = None
    new: Tensor | None = None
    for step in state.plan.steps[name]:
        changed = _TAKEN_AT[step](state, x if new is None else new)
        new = new if changed is None else changed
    return new


# --- 1, 2: queries and keys before the rotation


def _shared_keys(state: LayerState, x: Tensor) -> None:
    state.vectors = replace(state.vectors, shared=x)


def _queries(state: LayerState, x: Tensor) -> None:
    state.vectors = replace(state.vectors, q=_read(state, state.spec.q, x, state.spec.n_heads))


def _keys(state: LayerState, x: Tensor) -> None:
    state.vectors = replace(state.vectors, k=_read(state, state.spec.k, x, state.spec.n_kv_heads))


def _read(state: LayerState, tap: Tap | None, x: Tensor, n: int) -> Tensor:
    assert tap is not None
    vectors = tap.read(x, state.vectors.shared)
    if vectors.shape[2:] != (n, state.spec.d_head):
        heads, size = vectors.shape[2:]
        raise ValueError(
            f"{tap.name} has {heads} heads of size {size}, and {n} of {state.spec.d_head} when the hooks were made: "
            "make the hooks again after changing the model"
        )
    return vectors


# --- 3, 4: the rotation tables


def _cosines(state: LayerState, x: Tensor) -> Tensor | None:
    if state.plan.needs_positions:
        rotary = state.spec.require_rotary("rotation edits")
        state.positions = Positions(text.positions_from_table(x, rotary, state.expected))
        if state.positions.own is None:
            state.cos = x
        _fall_back_elsewhere(state)
    return _exchanged(state, x, "cos")


def _sines(state: LayerState, x: Tensor) -> Tensor | None:
    if state.cos is not None:
        _measure_rotation(state, state.cos, x)
        state.cos = None
    return _exchanged(state, x, "sin")


def _measure_rotation(state: LayerState, cos: Tensor, sin: Tensor) -> None:
    """Switch to the rotation of the running text if it differs from the one read from the model."""
    read = state.spec.require_rotary("rotation edits")
    rotary = text.measured_rotary(cos, sin, read)
    if rotary is None:
        _refuse_rotation(state)
    state.positions = Positions(text.positions_from_table(cos, rotary, state.expected))
    if state.positions.own is None:
        _refuse_rotation(state)
    for edit in {edit for rotation in state.plan.rotations for edit in rotation.edits}:
        if isinstance(edit, FrequencyLimit):
            edit.check(read, rotary, state.spec.layer)
    state.spec = replace(state.spec, rotary=rotary)
    if state.plan.turned_before or state.plan.table:
        state.fall_back()


def _fall_back_elsewhere(state: LayerState) -> None:
    """Fall back if vectors were turned for other positions than the model's, now or earlier in this text."""
    if state.positions.own is None or not state.plan.turned_before:
        return
    if not bool((state.own == state.expected).all()) or (state.text.misplaced and state.start > 0):
        state.fall_back()


def _refuse_rotation(state: LayerState) -> NoReturn:
    end = text.end_of_known(state.expected)
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
        state.positions = Positions(text.positions_from_vectors(before, after, rotary, state.expected))
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
    new, cached = None, x.shape[-1] > x.shape[-2]
    _check_cache(state, x)
    state.positions = _compared_with_slots(state, x)
    if cached or _reads_mask(state):
        mask = running_mask(state.spec, x.detach() <= _masked_below(state, x))
        unseen = state.positions.own is None
        state.positions = _read_from_mask(state, mask)
        if unseen:
            _fall_back_elsewhere(state)
        if state.edits_scores or cached or unseen:
            check_scores(state, x, mask.of_text)
        _check_start(state, mask)
        if state.edits_scores:
            new = edited_scores(state, x, mask)
    state.text = _extended_text(state, x)
    return new


def _masked_below(state: LayerState, x: Tensor) -> float:
    """Return the value at or below which a score is masked: no score of these queries and keys is as low.

    Users mask with numbers of any size, such as -1e4 and -1e9, added to a score or in its place.
    """
    by_model, spec = masked_below(x.dtype, state.dtype), state.spec
    if spec.problem is not None or state.vectors.q is None or any(r.patched for r in state.plan.rotations):
        return by_model
    q, k = (v.detach().float().norm(dim=-1).amax() for v in (state.queries, state.keys(x.shape[-1])))
    factor = max(1.0, spec.rotary.attention_factor**2) if spec.rotary else 1.0
    lowest = float(spec.capped(-q * k * abs(spec.require_scale()) * factor))
    return max(by_model, lowest - _MARGIN * (1 - lowest))


def _check_cache(state: LayerState, x: Tensor) -> None:
    """Refuse a KV cache that was not filled under the same interventions; ``x`` are scores, or the pattern."""
    n_query, n_key = x.shape[-2:]
    if n_query == n_key:
        return
    slots = (e for r in state.plan.rotations for e in r.edits if e.slots and e.by_position)
    if given := next(slots, None):
        raise ValueError(
            f"{given.tool} was given for each slot of a whole text, and layer {state.spec.layer} sees "
            f"{n_query} queries against {n_key} keys: give {given.by_position} for a KV cache, "
            f"or {WITHOUT_CACHE}"
        )
    if not state.text.holds(state.texts, n_key - n_query, state.spec.window):
        refuse_cache(state.spec, (n_query, n_key))


def _reads_mask(state: LayerState) -> bool:
    """Say whether something depends on the mask of the running text."""
    own, plan = state.positions.own, state.plan
    return (
        state.edits_scores
        or own is None
        or (state.positions.at_slots and plan.by_place)
        or (plan.needs_positions and text.restarts(own))
    )


def _compared_with_slots(state: LayerState, x: Tensor) -> Positions:
    """Return the positions, with ``at_slots`` set if they are the slots of the batch."""
    own, cached = state.positions.own, x.shape[-1] > x.shape[-2]
    if own is None or own.ndim > 1 or (cached and not state.text.positions.at_slots):
        return state.positions
    return replace(state.positions, at_slots=torch.equal(own, state.expected))


def _read_from_mask(state: LayerState, mask: RunningMask) -> Positions:
    """Count the queries in their text if needed; take the slots for positions if the model does not show them.

    Scores depend on differences of positions alone, so padding before a text makes no difference to them.
    """
    found, cached = state.positions, mask.seen.shape[-1] > mask.seen.shape[-2]
    own = found.own
    if own is None:
        own = state.start + torch.arange(mask.seen.shape[-2], device=mask.seen.device)
        found = replace(found, own=own, at_slots=True)
    if state.plan.counts:
        before = state.text.positions.counted if cached else None
        if before is None:
            counted = index_in_text(own, mask.starts)
        else:
            counted = before[:, -1:] + 1 + torch.arange(own.shape[-1], device=own.device)
        found = replace(found, counted=counted)
    if not cached and text.restarts(own):
        text.check_packed(own, mask)
    return found


def _check_start(state: LayerState, mask: RunningMask) -> None:
    """Refuse functions of the position if their result depends on whether the first keys are padding or hidden.

    The model's positions are then the slots of the batch, and no token from a ``start`` on sees the keys before.
    """
    if not (state.plan.by_place and state.positions.at_slots):
        return
    own = state.places(mask.starts.shape[-1])[1]
    seen = mask.seen.any(1)
    for start in mask.starts.any(0).nonzero()[:, 0].flip(0).tolist():  # the whole block first
        rows = mask.starts[:, start]
        at = own[start:][seen[rows, start:].any(0)]
        for edit in {edit for rotation in state.plan.rotations for edit in rotation.edits}:
            if not edit.same_from(at, int(own[start]), state.spec.require_rotary("rotation edits")):
                refuse_start(state.spec, edit.tool, int(rows.nonzero()[0]), start)


def _extended_text(state: LayerState, x: Tensor) -> TextSoFar:
    """Return what the next pass needs if it continues this text, which it can only with a KV cache."""
    n_key, cached = x.shape[-1], x.shape[-1] > x.shape[-2]
    if not (cached or state.continues):
        return TextSoFar()
    before = state.text if cached else TextSoFar()
    keys, values, k = None, None, state.vectors.k
    if k is not None:  # all are needed to recompute scores, or to compare a pattern
        every = state.plan.reads_vectors or state.spec.scores is None or state.fell_back
        keys = (state.keys(n_key) if every else k[:, -1:]).detach().clone()
    if state.spec.scores is None and state.edits_scores:
        values = state.values(n_key).detach().clone()
    positions = before.continued_by(state.positions) if cached else state.positions
    return TextSoFar(state.texts, n_key, positions, state.misplaced, keys, values)


# --- 8 to 11: models that neither show scores nor use edited ones


def _values(state: LayerState, x: Tensor) -> None:
    assert state.spec.v is not None
    state.vectors = replace(state.vectors, v=state.spec.v.read(x))


def _gate(state: LayerState, x: Tensor) -> None:
    assert state.spec.gate is not None
    state.vectors = replace(state.vectors, gate=state.spec.gate.read(x))


def _put_in(state: LayerState, x: Tensor) -> Tensor | None:
    """Put in the result of edited scores, for a text without padding; the pattern shows whether it has none."""
    if not state.edits_scores:
        return None
    state.vectors = replace(state.vectors, z=x)
    at = torch.arange(state.start + x.shape[1], device=x.device)[state.start - state.cached :]
    counted = at[state.cached :]
    own = counted if state.positions.own is None else state.own
    state.positions = replace(state.positions, own=own, counted=counted)
    mask = running_mask(state.spec, x.new_zeros((len(x), 1, len(counted), len(at)), dtype=torch.bool))
    if state.rescored or state.plan.recomputes:
        scores = own_scores(state, mask)
    else:  # the edits do not read scores
        scores = x.new_zeros(len(x), state.spec.n_heads, len(counted), len(at))
    heads, result = result_of(state, scores, mask)
    _finish(state)
    return x.index_copy(2, torch.tensor(heads, device=x.device), result.to(x.dtype))


def _pattern(state: LayerState, x: Tensor) -> None:
    """Check what the edits relied on, in the pattern, the only trace of mask and positions in these models.

    They must be those of a text without padding, either whole or continuing a cached one.
    """
    state.pattern = x
    n_query, n_key = x.shape[-2:]
    if n_key - n_query not in (state.start, state.cached) and (state.edits_scores or state.plan.turned_before):
        refuse_part(state.spec, (n_query, n_key))
    if state.positions.own is None:
        state.positions = Positions(state.expected)
    _check_cache(state, x)
    if state.edits_scores or state.plan.rotated:
        at = torch.arange(n_key, device=x.device)
        check_scores(state, x, state.spec.sees(at[n_key - n_query :, None] - at), pattern=True)
    _finish(state)


def _finish(state: LayerState) -> None:
    """Compare result and pattern, once both are seen, in whichever order; keep what the next pass needs."""
    z, pattern = state.vectors.z, state.pattern
    if pattern is None or (z is None and state.edits_scores):
        return
    if z is not None:
        check_result(state, z, pattern)
    state.text = _extended_text(state, pattern)


# --- 12: results


def _result(state: LayerState, x: Tensor) -> Tensor:
    z = by_heads(x, state.spec.n_heads)
    for edit, heads in state.plan.result_edits:
        at = torch.tensor(heads, device=z.device)
        z = z.index_copy(2, at, edit.replace(state.spec.layer, heads, z[:, :, at]).to(z.dtype))
    return z.reshape(x.shape)


_TAKEN_AT = {
    Step.SHARED_KEYS: _shared_keys,
    Step.QUERIES: _queries,
    Step.KEYS: _keys,
    Step.COSINES: _cosines,
    Step.SINES: _sines,
    Step.TURN_QUERIES: _turn_queries,
    Step.TURN_KEYS: _turn_keys,
    Step.SCORES: _scores,
    Step.VALUES: _values,
    Step.GATE: _gate,
    Step.PUT_IN: _put_in,
    Step.PATTERN: _pattern,
    Step.RESULT: _result,
}
