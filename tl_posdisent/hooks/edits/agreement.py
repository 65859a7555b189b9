"""Check in a running pass that a layer computes what was read from it, since the edits rely on that.

Edits of other lists of hooks on the same scores show here too, and so does a model that runs within its own hooks.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from tl_posdisent.hooks.edits.running_layer import RunningLayer
from tl_posdisent.hooks.edits.running_positions import rounding
from tl_posdisent.hooks.edits.scores_at_distances import own_vectors
from tl_posdisent.models.capture import spread_rows
from tl_posdisent.models.patterns import masked_softmax
from tl_posdisent.utils.precision import mismatch

Z_OF_VALUES = "the sum of the values at its hooks, weighted by its pattern"

_ROWS_CHECKED = 8


def check_scores(layer: RunningLayer, heads: Sequence[int]) -> None:
    """Recompute some rows of the model's own scores from queries, keys and rotation; raise if they differ."""
    rows = spread_rows(len(layer.slots), _ROWS_CHECKED, layer.q.device)
    shown = layer.scores.detach()[:, :, rows][:, list(heads)]
    visible = shown > layer.masked_below
    if not layer.spec.shows_mask:
        visible = visible & layer.spec.sees(rows[:, None] - layer.slots)
    if layer.known_positions is None:  # padding after a text has positions of its own
        visible = visible & ~layer.mask.after[:, None, rows, None]
    _compare(layer, heads, rows, shown[visible], visible)


def check_pattern(layer: RunningLayer, heads: Sequence[int], pattern: Float[Tensor, "batch head query key"]) -> None:
    """Compare some rows of the pattern of a model that shows no scores, the only trace of its mask and positions."""
    rows = spread_rows(len(layer.slots), _ROWS_CHECKED, layer.q.device)
    _compare(layer, heads, rows, pattern.detach()[:, :, rows][:, list(heads)], None)


def _compare(layer: RunningLayer, heads: Sequence[int], rows: Tensor, theirs: Tensor, visible: Tensor | None) -> None:
    """Raise unless the scores of some rows are those of queries and keys; without ``visible``, compare patterns."""
    spec = layer.spec
    q, k = (x.detach() for x in own_vectors(layer, heads))
    ours = spec.score(q[:, rows], k)
    ours = masked_softmax(ours, spec.sees(rows[:, None] - layer.slots)) if visible is None else ours[visible]
    turned = rounding(spec.rotary, layer.positions) if spec.rotary else 0.0
    slack = turned * float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax()) * spec.require_scale()
    if mismatch(theirs, ours, layer.q.dtype, slack) > 1:
        spec.check_length(int(layer.positions.max()) + 1, "interventions on attention")
        raise ValueError(
            f"scores of layer {spec.layer} of {spec.architecture} are not what its queries, keys and rotation give: "
            "padding, a mask, positions or tables that hooks cannot see here, or other hooks act on its attention; run "
            "the model on whole, unpadded texts without them. Lists of hooks of this package act together if they are "
            "added, a + b, and a list acts once"
        )


def check_result(
    layer: RunningLayer,
    heads: list[int],
    z: Float[Tensor, "batch pos head d_value"],
    pattern: Float[Tensor, "batch head query key"],
) -> None:
    """Raise unless z is the pattern times values (and gate): only then can it be computed from edited scores."""
    spec = layer.spec
    rows = spread_rows(z.shape[1], _ROWS_CHECKED, z.device)
    theirs = z.detach()[:, rows][:, :, heads].double()
    ours = layer.gathered(pattern.detach()[:, heads][:, :, rows].double(), heads, rows).detach()
    if ours.shape != theirs.shape or mismatch(theirs, ours, z.dtype) > 1:
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture} shows no scores that could be edited, and its hook_z is not "
            f"{Z_OF_VALUES}: its scores cannot be changed"
        )
