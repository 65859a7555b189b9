"""Check in a running pass what the edits of a layer rely on: its scores or its pattern, and its result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.hooks.edits.running_layer import RunningLayer
from tl_posdisent.hooks.edits.scores_at_distances import add_product, own_vectors
from tl_posdisent.models import agreement
from tl_posdisent.utils.precision import mismatch


def rest_of_scores(layer: RunningLayer, heads: Sequence[int]) -> Float[Tensor, "batch head query key"]:
    """Return the scores of some heads less the product of queries and keys; raise unless it is rounding and the mask.

    Other hooks that change scores, or queries and keys after these were read, show in any cell.
    """
    shown = layer.scores if len(heads) == layer.spec.n_heads else layer.scores[:, list(heads)]
    vectors = own_vectors(layer, heads)
    rest = add_product(layer.spec, shown.to(vectors.q.dtype, copy=True), vectors, -1)
    with torch.no_grad():
        masked = shown <= layer.masked_below
        if not layer.spec.limits.shows_mask:
            masked = masked | ~layer.mask.allowed
        if bool(layer.mask.after.any()):  # padding after a text has positions of its own
            masked = masked | layer.mask.after[:, None, :, None]
        rows = agreement.checked_rows(len(layer.slots), shown.device)
        largest = shown[:, :, rows].masked_fill(masked[:, :, rows], 0.0)
        slack = _slack(layer, *(x.detach() for x in vectors))
        agreement.check_rest(layer.spec, rest, masked, largest, layer.q.dtype, slack)
    return rest


def check_pattern(layer: RunningLayer, heads: Sequence[int], pattern: Float[Tensor, "batch head query key"]) -> None:
    """Compare the pattern of a model that shows no scores, the only trace of its mask and positions."""
    q, k = (x.detach() for x in own_vectors(layer, heads))
    shown = pattern.detach()[:, list(heads)]
    agreement.check_pattern(layer.spec, q, k, shown, layer.slots, layer.q.dtype, _slack(layer, q, k))


def _slack(layer: RunningLayer, q: Tensor, k: Tensor) -> float:
    """Bound the error of scores that comes from rounding of angles."""
    spec = layer.spec
    turned = 0.0
    if spec.rotary is not None:  # frequencies are rounded to float32, so far positions are less exact
        farthest = float((len(layer.slots) - 1) * spec.rotary.frequencies.abs().max())
        turned = 1e-4 + 4 * torch.finfo(torch.float32).eps * farthest
    return turned * float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax()) * spec.require_scale()


def check_result(
    layer: RunningLayer,
    heads: list[int],
    z: Float[Tensor, "batch pos head d_value"],
    pattern: Float[Tensor, "batch head query key"],
) -> None:
    """Raise unless z is the pattern times values (and gate): only then can it be computed from edited scores."""
    spec, theirs = layer.spec, z.detach()[:, :, heads].double()
    ours = layer.gathered(pattern.detach()[:, heads].double(), heads).detach()
    if ours.shape != theirs.shape or mismatch(theirs, ours, z.dtype) > 1:
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture} shows no scores that could be edited, and its hook_z is not "
            "the sum of its values, weighted by its pattern: its scores cannot be changed, or other hooks act on its "
            "attention"
        )
