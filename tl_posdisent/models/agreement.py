"""Check that a layer computes in a running pass what was read from it: hooks and captures rely on that.

Its scores (its pattern, if it shows no scores) are computed from its queries, keys and rotation. Edits by other hooks
on the same scores, queries or keys show here too.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.models.patterns import masked_softmax
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.precision import mismatch

_ROWS_CHECKED = 32
_HIDDEN = 30.0  # a key whose score lies this far below its product has less than 1e-13 of the attention that is due


def checked_rows(length: int, device: torch.device) -> Int[Tensor, " row"]:
    """Choose the rows that are compared: evenly spaced, first and last included.

    Computed in float64, which represents the indices of long texts exactly.
    """
    n = min(length, _ROWS_CHECKED)
    rows: Tensor = torch.linspace(0, length - 1, n, dtype=torch.float64).round().long()
    return rows.to(device)


@torch.no_grad()
def product_rounding(
    spec: AttentionSpec,
    q_rot: Float[Tensor, "batch query head d_head"],
    k_rot: Float[Tensor, "batch key kv d_head"],
    *dtypes: torch.dtype,
) -> Float[Tensor, "head 1 1"]:
    """Bound the rounding of the scores of these vectors, in a model that computes them in these dtypes.

    A product of vectors is rounded by some units of its dtype, relative to their lengths; angles of rotation by some
    units of float32, relative to the angle at the farthest position.
    """
    q, k = (x.detach().norm(dim=-1).amax((0, 1)) for x in (q_rot, k_rot))
    k = k.repeat_interleave(len(q) // len(k))
    units = 10 * max(torch.finfo(dtype).eps for dtype in dtypes)
    if spec.rotary is not None:
        farthest = (k_rot.shape[1] - 1) * float(spec.rotary.frequencies.abs().max())
        units += 8 * torch.finfo(torch.float32).eps * (8 + farthest)
    rounding: Tensor = units * abs(spec.require_scale()) * q * k
    return rounding[:, None, None]


@torch.no_grad()
def check_product(
    spec: AttentionSpec, rest: Float[Tensor, "batch head query key"], rounding: Float[Tensor, "head 1 1"]
) -> Bool[Tensor, "batch head query key"]:
    """Raise unless scores less the product of queries and keys are rounding, or those of hidden keys; return these.

    Queries whose keys are hidden from all are padding, which has positions of its own.
    """
    hidden = hidden_keys(rest, rounding)
    right = (rest <= rounding).logical_and_((rest >= -rounding).logical_or_(hidden))  # NaN is not
    see_themselves = ~hidden.diagonal(0, -2, -1).flatten(1)
    if bool(right.all()) and bool(see_themselves.any(-1).all()):
        return hidden
    real = real_tokens(~hidden)  # a text without keys may have scores of any size
    if not bool((right | ~real[..., None]).all()) or not bool(real.any(-1).all()):
        raise disagreement(spec, rest)
    return hidden


def real_tokens(visible: Bool[Tensor, "batch head query key"]) -> Bool[Tensor, "batch 1 pos"]:
    """Find the tokens that are not padding: some query sees them, nearly always their own."""
    own: Tensor = visible.diagonal(0, -2, -1).any(1, keepdim=True)
    return own if bool(own.all()) else visible.any(-2).any(1, keepdim=True)


@torch.no_grad()
def hidden_keys(
    rest: Float[Tensor, "batch head query key"], rounding: Float[Tensor, "head 1 1"]
) -> Bool[Tensor, "batch head query key"]:
    """Find the keys that a query does not see, for any reason, by its scores less the product of queries and keys.

    However small the mask value is, -50 or -1e4, it is told from low scores: these are low products. A layer that adds
    a bias to its products (ALiBi) has no such rest: there a key is hidden at the mask values of models alone
    (``AttentionSpec.is_masked``), since far keys of a long text have biases of -50 and less, too.
    """
    hidden: Tensor = rest < -_HIDDEN - 4 * rounding
    return hidden


@torch.no_grad()
def check_scores(
    spec: AttentionSpec,
    q_rot: Float[Tensor, "batch row head d_head"],
    k_rot: Float[Tensor, "batch key kv d_head"],
    shown: Float[Tensor, "batch head row key"],
    dtype: torch.dtype,
    rows: Int[Tensor, " row"],
) -> None:
    """Raise unless the scores in some rows are those of these queries and keys under the layer's own mask.

    Args:
        shown: the model's scores.
        dtype: that of the model's queries and keys.
    """
    inside = spec.sees(rows[:, None] - torch.arange(k_rot.shape[1], device=rows.device))
    rest = shown - spec.score(q_rot, k_rot)
    rounding = product_rounding(spec, q_rot, k_rot, shown.dtype, dtype)
    hidden = hidden_keys(rest, rounding)
    more = bool((~hidden & ~inside).any())
    if more or bool((hidden & spec.is_masked(shown) & inside).any()):
        spec.refuse_nan(rest)
        raise ValueError(spec.other_mask(k_rot.shape[1], more=more))
    if not bool(((rest.abs() <= rounding) | ~inside).all()):
        raise disagreement(spec, rest)


@torch.no_grad()
def check_pattern(
    spec: AttentionSpec,
    q_rot: Float[Tensor, "batch row head d_head"],
    k_rot: Float[Tensor, "batch key kv d_head"],
    shown: Float[Tensor, "batch head row key"],
    dtype: torch.dtype,
    rows: Int[Tensor, " row"] | None = None,
) -> None:
    """Raise unless the pattern in some rows is that of these rotated queries and keys under the layer's own mask."""
    keys = torch.arange(k_rot.shape[1], device=k_rot.device)
    inside = spec.sees((keys if rows is None else rows)[:, None] - keys)
    scores = spec.score(q_rot, k_rot)
    expected, units = masked_softmax(scores, inside), 16 * torch.finfo(torch.promote_types(shown.dtype, dtype)).eps
    rounding = 2 * product_rounding(spec, q_rot, k_rot, shown.dtype, dtype) + units
    if not bool(((shown - expected).abs() <= rounding * expected + units).all()):
        raise disagreement(spec, shown - expected)


def check_result(
    spec: AttentionSpec, z: Float[Tensor, "batch pos head size"], gathered: Float[Tensor, "batch pos head size"]
) -> None:
    """Raise unless z is the pattern times values (and gate): only then can it be computed from edited scores."""
    theirs = z.double()
    if gathered.shape != theirs.shape or mismatch(theirs, gathered.double(), z.dtype) > 1:
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture} shows no scores that could be edited, and its hook_z is not "
            "the sum of its values, weighted by its pattern: its scores cannot be changed, or other hooks act on its "
            "attention"
        )


def disagreement(spec: AttentionSpec, rest: Float[Tensor, "batch head row key"]) -> ValueError:
    """Return the error for scores that are not those of the reading, or raise that for NaN or a text beyond its length.

    Args:
        rest: scores (a pattern) less what the reading gives.
    """
    spec.refuse_nan(rest)
    spec.check_length(rest.shape[-1], "scores that are recomputed from queries and keys")
    return ValueError(
        f"scores of layer {spec.layer} of {spec.architecture} are not what its queries, keys and rotation give at the "
        "positions 0, 1, 2 …: packed texts, positions with gaps, padding or a bias that cannot be seen here, or other "
        "hooks act on its attention, or the model was changed after it was read. Run it on whole texts, without other "
        "hooks on these heads; after a change of its rotation or scale, read the model and make the hooks again"
    )
