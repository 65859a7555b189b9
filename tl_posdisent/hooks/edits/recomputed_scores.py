"""Recompute a layer's scores under edits, from its queries and keys, and its result from these scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.hooks.edits import running_positions as text
from tl_posdisent.hooks.edits.layer_state import LayerState, refuse_part, refuse_start
from tl_posdisent.hooks.edits.rotation_edits import HeadRotation
from tl_posdisent.hooks.edits.running_mask import RunningMask, other_indices
from tl_posdisent.hooks.edits.score_edits import Order, ScoreEdit, View
from tl_posdisent.hooks.edits.scores_at_distances import rotated_scores
from tl_posdisent.models.patterns import masked_softmax

_FITTED = (Order.REPLACE, Order.COMPONENT)  # edits that fit a text's scores


def own_scores(state: LayerState, mask: RunningMask) -> Float[Tensor, "batch head query key"]:
    """Compute the scores of a model that does not show them, under the rotation edits that it has applied."""
    q, spec = state.queries, state.spec
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.new_zeros(len(q), spec.n_heads, *mask.seen.shape[-2:], dtype=wide)
    for rotation, heads in state.plan.alike(range(spec.n_heads)).items():
        if rotation not in state.rescored:
            scores[:, heads] = _rotated(state, rotation, heads, mask, None)
    return scores


def edited_scores(
    state: LayerState, x: Float[Tensor, "batch head query key"], mask: RunningMask
) -> Float[Tensor, "batch head query key"]:
    """Apply all edits to a layer's scores, which stay unchanged outside the mask."""
    x, (n_query, n_key) = x.clone(), x.shape[-2:]
    for rotation, heads in state.rescored.items():
        before = None if state.spec.scores is None else x[:, heads]
        new = _rotated(state, rotation, heads, mask, before)
        x[:, heads] = torch.where(of_heads(mask.visible, heads), new.to(x.dtype), x[:, heads])
    for edit, chosen in state.plan.score_edits:
        if not edit.cached and n_query != n_key:
            refuse_part(state.spec, (n_query, n_key), edit.tool)
        if n_key == 1 and edit.order == Order.COMPONENT:
            continue  # one score is its own mean
        inside = mask.visible if edit.order == Order.HIDE else mask.of_text
        if edit.order in _FITTED and not edit.cached:
            text.check_one_text(state.spec, of_heads(inside, chosen), edit.tool)
        for rotation, heads in state.plan.alike(chosen).items() if edit.vectors else [(HeadRotation(), list(chosen))]:
            before = x[:, heads]
            left = of_heads(inside, heads) & (before != -torch.inf)
            vectors = state.queries_and_keys(heads, n_key) if edit.vectors else None
            counted = state.counts(n_key) if edit.counts else None
            view = View(state.spec, heads, left, rotation, state.places(n_key), counted, before, vectors)
            x[:, heads] = torch.where(left, edit.edit(view).to(x.dtype), before)
            if counted is not None:
                _check_start(state, view, edit, mask.starts, x[:, heads])
    return x


def _check_start(
    state: LayerState, view: View, edit: ScoreEdit, starts: Bool[Tensor, "batch key"], new: Tensor
) -> None:
    """Refuse an edit by indices in the text if its result depends on whether the first keys are padding or hidden."""
    assert view.counted is not None
    n_query, n_key = new.shape[-2:]
    own = state.places(n_key)[1]
    for start, index in other_indices(view.counted[1], own, starts):
        other = edit.edit(replace(view, counted=(index[:, -n_query:], index))).to(new.dtype)
        differs = (view.inside & (other != new)).flatten(1).any(1)
        if bool(differs.any()):
            refuse_start(state.spec, edit.tool, int(differs.nonzero()[0]), start)


def result_of(
    state: LayerState, scores: Float[Tensor, "batch head query key"], mask: RunningMask
) -> tuple[list[int], Float[Tensor, "batch query edited d_head"]]:
    """Apply all edits to a layer's scores; return the heads that they act on and the attention output of these."""
    pattern = masked_softmax(edited_scores(state, scores, mask), mask.visible)
    # For other heads, whose vectors are turned, the model's own result is right, and scores may be unknown.
    heads = sorted({h for _, some in [*state.rescored.items(), *state.plan.score_edits] for h in some})
    return heads, gathered(state, pattern[:, heads], heads)


def gathered(
    state: LayerState,
    pattern: Float[Tensor, "batch some row key"],
    heads: Sequence[int],
    rows: Tensor | slice = slice(None),
) -> Float[Tensor, "batch row some d_head"]:
    """Compute z of some heads, for some queries, from their patterns."""
    values, gate = state.values(pattern.shape[-1]), state.vectors.gate
    of_some = values[:, :, [state.spec.key_head(head) for head in heads]]
    return state.spec.gathered(pattern, of_some, None if gate is None else gate[:, rows][:, :, list(heads)])


def of_heads(inside: Bool[Tensor, "*lead query key"], heads: Sequence[int]) -> Bool[Tensor, "*_ query key"]:
    """Return the mask of some heads."""
    return inside[:, list(heads)] if inside.ndim == 4 and inside.shape[1] > 1 else inside


def _rotated(
    state: LayerState, rotation: HeadRotation, heads: list[int], mask: RunningMask, before: Tensor | None
) -> Float[Tensor, "batch head query key"]:
    n_key = mask.seen.shape[-1]
    q, k = state.queries_and_keys(heads, n_key)
    by_slot = rotation.position is not None and rotation.position.slots
    part = _part(state, q.shape[1], n_key) if by_slot else None
    return rotated_scores(state.spec, rotation, heads, q, k, state.places(n_key), mask.seen, before, part)


def _part(state: LayerState, n_query: int, n_key: int) -> tuple[int, int] | None:
    """Return the slots (padding included) of the first query and the first key if the text is run in parts."""
    if n_key == n_query and not state.continues:
        return None
    return state.start, state.start + n_query - n_key
