"""Check that a layer computes in a running pass what was read from it: hooks and captures rely on that.

Some rows of its scores (of its pattern, if it shows no scores) are computed from its queries, keys and rotation. Edits
by other hooks on the same scores show here too.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.models.patterns import masked_softmax
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.precision import mismatch, score_tolerance

_ROWS_CHECKED = 32


def checked_rows(length: int, device: torch.device) -> Int[Tensor, " row"]:
    """Choose the rows that are compared: evenly spaced, first and last included.

    Computed in float64, which represents the indices of long texts exactly.
    """
    n = min(length, _ROWS_CHECKED)
    rows: Tensor = torch.linspace(0, length - 1, n, dtype=torch.float64).round().long()
    return rows.to(device)


def check_scores(
    spec: AttentionSpec,
    q_rot: Float[Tensor, "batch row head d_head"],
    k_rot: Float[Tensor, "batch key kv d_head"],
    shown: Float[Tensor, "batch head row key"],
    visible: Bool[Tensor, "*lead row key"],
    dtype: torch.dtype,
    slack: float = 0.0,
) -> None:
    """Raise unless the scores in some rows are those of these rotated queries and keys.

    Args:
        shown: the model's scores; those of keys that are not visible do not count.
        dtype: that of the model's queries and keys.
        slack: error of the scores that comes from rounding of angles.
    """
    theirs, ours = (torch.where(visible, x, 0.0) for x in (shown, spec.score(q_rot, k_rot)))
    if mismatch(theirs, ours, dtype, slack) > 1:
        raise _disagreement(spec, k_rot.shape[1])


def check_rest(
    spec: AttentionSpec,
    rest: Float[Tensor, "batch head query key"],
    masked: Bool[Tensor, "batch head query key"],
    scores: Float[Tensor, "batch head row key"],
    dtype: torch.dtype,
    slack: float = 0.0,
) -> None:
    """Raise unless scores less the product of queries and keys are rounding of ``scores``, or within slack.

    Masked cells do not count.
    """
    allowed = score_tolerance(scores.dtype, dtype) * scores.abs().amax() + slack
    right = (rest <= allowed).logical_and_(rest >= -allowed)  # NaN is not
    if not bool(right.logical_or_(masked).all()):
        raise _disagreement(spec, rest.shape[-1])


def check_pattern(
    spec: AttentionSpec,
    q_rot: Float[Tensor, "batch row head d_head"],
    k_rot: Float[Tensor, "batch key kv d_head"],
    shown: Float[Tensor, "batch head row key"],
    rows: Int[Tensor, " row"],
    dtype: torch.dtype,
    slack: float = 0.0,
) -> None:
    """Raise unless the pattern in some rows is that of these rotated queries and keys under the layer's own mask."""
    inside = spec.sees(rows[:, None] - torch.arange(k_rot.shape[1], device=rows.device))
    scores = spec.score(q_rot, k_rot)
    slack += 8 * torch.finfo(dtype).eps * float(torch.where(inside, scores, 0.0).abs().amax())
    if mismatch(shown, masked_softmax(scores, inside), dtype, slack) > 1:
        raise _disagreement(spec, k_rot.shape[1])


def _disagreement(spec: AttentionSpec, length: int) -> ValueError:
    spec.check_length(length, "scores that are recomputed from queries and keys")
    return ValueError(
        f"scores of layer {spec.layer} of {spec.architecture} are not what its queries, keys and rotation give: "
        "padding, a mask, positions or tables that cannot be seen here, or other hooks act on its attention; run the "
        "model on whole, unpadded texts without them. Lists of hooks of this package act together if they are added, "
        "a + b, and a list acts once"
    )
