"""Check in a running pass what the edits of a layer rely on: its scores or its pattern, and its result."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from tl_posdisent.hooks.edits.running_layer import RunningLayer
from tl_posdisent.hooks.edits.running_positions import rounding
from tl_posdisent.hooks.edits.scores_at_distances import own_vectors
from tl_posdisent.models import agreement
from tl_posdisent.utils.precision import mismatch

Z_OF_VALUES = "the sum of the values at its hooks, weighted by its pattern"


def check_scores(layer: RunningLayer, heads: Sequence[int]) -> None:
    """Raise unless some rows of the model's own scores are those of queries, keys and rotation."""
    rows = agreement.checked_rows(len(layer.slots), layer.q.device)
    shown = layer.scores.detach()[:, :, rows][:, list(heads)]
    visible = shown > layer.masked_below
    if not layer.spec.limits.shows_mask:
        visible = visible & layer.spec.sees(rows[:, None] - layer.slots)
    if layer.known_positions is None:  # padding after a text has positions of its own
        visible = visible & ~layer.mask.after[:, None, rows, None]
    q, k = (x.detach() for x in own_vectors(layer, heads))
    agreement.check_scores(layer.spec, q[:, rows], k, shown, visible, layer.q.dtype, _slack(layer, q, k))


def check_pattern(layer: RunningLayer, heads: Sequence[int], pattern: Float[Tensor, "batch head query key"]) -> None:
    """Compare some rows of the pattern of a model that shows no scores, the only trace of its mask and positions."""
    rows = agreement.checked_rows(len(layer.slots), layer.q.device)
    shown = pattern.detach()[:, :, rows][:, list(heads)]
    q, k = (x.detach() for x in own_vectors(layer, heads))
    agreement.check_pattern(layer.spec, q[:, rows], k, shown, rows, layer.q.dtype, _slack(layer, q, k))


def _slack(layer: RunningLayer, q: Tensor, k: Tensor) -> float:
    """Bound the error of scores that comes from rounding of angles."""
    spec = layer.spec
    turned = rounding(spec.rotary, layer.positions) if spec.rotary else 0.0
    return turned * float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax()) * spec.require_scale()


def check_result(
    layer: RunningLayer,
    heads: list[int],
    z: Float[Tensor, "batch pos head d_value"],
    pattern: Float[Tensor, "batch head query key"],
) -> None:
    """Raise unless z is the pattern times values (and gate): only then can it be computed from edited scores."""
    spec = layer.spec
    rows = agreement.checked_rows(z.shape[1], z.device)
    theirs = z.detach()[:, rows][:, :, heads].double()
    ours = layer.gathered(pattern.detach()[:, heads][:, :, rows].double(), heads, rows).detach()
    if ours.shape != theirs.shape or mismatch(theirs, ours, z.dtype) > 1:
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture} shows no scores that could be edited, and its hook_z is not "
            f"{Z_OF_VALUES}: its scores cannot be changed"
        )
