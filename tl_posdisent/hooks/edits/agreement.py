"""Check in a running pass that a layer computes what was read from it, since the edits rely on that."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.hooks.edits import running_positions as text
from tl_posdisent.hooks.edits.layer_plan import Z_OF_VALUES, Grouped, grouped
from tl_posdisent.hooks.edits.layer_state import LayerState, refuse_cache
from tl_posdisent.hooks.edits.recomputed_scores import gathered, of_heads
from tl_posdisent.hooks.edits.rotation_edits import HeadRotation
from tl_posdisent.hooks.edits.scores_at_distances import rotated_vectors
from tl_posdisent.hooks.edits.turned_vectors import turned_vectors
from tl_posdisent.models.capture import spread_rows
from tl_posdisent.models.patterns import masked_softmax
from tl_posdisent.utils.precision import mismatch

_ROWS_CHECKED = 8


def check_scores(
    state: LayerState,
    x: Float[Tensor, "batch head query key"],
    inside: Bool[Tensor, "*lead query key"],
    *,
    pattern: bool = False,
) -> None:
    """Recompute some rows of the model's own scores from vectors, rotation and cached keys; raise if they differ.

    Args:
        x: the scores, or with ``pattern`` the attention pattern of a model that does not show its scores.
    """
    spec, (n_query, n_key) = state.spec, x.shape[-2:]
    cached = n_key > n_query
    if spec.problem is not None or state.vectors.q is None:
        return
    queries, keys = state.queries.detach(), state.keys(n_key).detach()
    if state.misplaced:
        if cached and any(rotation.patched for rotation in (*state.plan.turned_q, *state.plan.turned_k)):
            return
        queries, keys = _as_turned(state, queries, keys)
    own, known = state.places(n_key), keys.shape[1]
    rows = spread_rows(n_query, _ROWS_CHECKED, x.device)
    for rotation, heads in _in_force(state, pattern=pattern, cached=cached).items():
        if cached and rotation.patched:
            continue
        q, k = queries[:, :, heads], keys[:, :, [spec.key_head(h) for h in heads]]
        q_rot, k_rot = rotated_vectors(spec, rotation, heads, q, k, (own[0], own[1][..., -known:]))
        ours = spec.score(q_rot[:, rows], k_rot)
        theirs, seen = x[:, heads][:, :, rows, -known:].detach(), of_heads(inside, heads)[..., rows, -known:]
        if pattern:
            ours, seen = masked_softmax(ours, seen), torch.ones_like(seen)
        seen = seen.expand(theirs.shape)
        turned = text.rounding(spec.rotary, own[0]) if spec.rotary else 0.0
        slack = turned * float(q_rot.norm(dim=-1).amax() * k_rot.norm(dim=-1).amax()) * spec.require_scale()
        if mismatch(theirs[seen], ours[seen], state.dtype, slack) <= 1:
            continue
        spec.check_length(n_key, "interventions that recompute scores")
        if cached:
            refuse_cache(spec, (n_query, n_key))
        raise ValueError(
            f"scores of layer {spec.layer} of {spec.architecture} are not what its queries, keys and "
            "rotation give: padding, a mask, positions or tables that hooks cannot see here, or other hooks act on its "
            "attention; run the model on whole, unpadded texts without them"
        )


def _in_force(state: LayerState, *, pattern: bool, cached: bool) -> Grouped:
    """Group the heads whose scores must be known by the edits that the model has already applied.

    The model applies edits of tables and turned vectors itself. Scores that are recomputed take no part in that,
    but for the tables, which act on all heads; after a fall-back, tables were left as they are.
    """
    rescored = {head for some in state.rescored.values() for head in some}
    read = {h for edit, heads in state.plan.score_edits if edit.vectors or pattern for h in heads}
    if cached or not state.spec.cos or (pattern and state.plan.by_place):
        read |= state.plan.heads
    now = HeadRotation() if state.fell_back else state.plan.table
    return grouped((head, now if head in rescored else state.plan.rotations[head]) for head in sorted(rescored | read))


def _as_turned(state: LayerState, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the model rotated to its positions: vectors that were turned for the slots of the batch.

    That was before the text showed its rotation, so by the one that was read from the model.
    """
    rotary, n_slots = state.plan.spec.require_rotary("turning"), state.start + queries.shape[1]
    at = torch.arange(n_slots, device=queries.device)
    return (
        turned_vectors(state.plan, rotary, queries, "q", at[-queries.shape[1] :], behind=False),
        turned_vectors(state.plan, rotary, keys, "k", at[-keys.shape[1] :], behind=False),
    )


def check_result(
    state: LayerState, own: Float[Tensor, "batch pos head d_head"], pattern: Float[Tensor, "batch head query key"]
) -> None:
    """Raise unless z is the pattern times values (and gate): only then can it be computed from edited scores."""
    spec = state.spec
    pattern, z, heads = pattern.detach(), own.detach().double(), sorted(state.plan.heads)
    rows = spread_rows(z.shape[1], _ROWS_CHECKED, z.device)
    ours = gathered(state, pattern[:, heads][:, :, rows].double(), heads, rows)
    z = z[:, rows][:, :, heads]
    ours = ours.detach()
    if ours.shape != z.shape or mismatch(z, ours, own.dtype) > 1:
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture} shows no scores that could be edited, and its hook_z is not "
            f"{Z_OF_VALUES}: its scores cannot be changed"
        )
