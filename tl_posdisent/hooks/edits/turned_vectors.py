"""Queries and keys as hooks return them: turned to other positions, or replaced by those of another run."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.hooks.edits.layer_plan import LayerPlan
from tl_posdisent.hooks.edits.rotation_edits import HeadRotation, Side, check_patch
from tl_posdisent.rope.rotary import Rotary, turn


def turned_vectors(
    plan: LayerPlan,
    rotary: Rotary,
    x: Float[Tensor, "batch pos head d_head"],
    which: Side,
    own: Tensor,
    *,
    behind: bool,
) -> Tensor:
    """Return queries or keys in which some heads are turned, as the plan says.

    Args:
        plan, rotary: the edits; the rotation of the running text.
        x: the vectors of all heads.
        which: whether they are queries or keys.
        own: their positions.
        behind: whether the model has rotated them already.
    """
    for rotation, heads in (plan.turned_q if which == "q" else plan.turned_k).items():
        at = torch.tensor(heads, device=x.device)
        some = _of_heads(plan, rotary, x[:, :, at], rotation, heads, which, own, behind).to(x.dtype)
        x = some if len(heads) == x.shape[2] else x.index_copy(2, at, some)
    return x


def _of_heads(
    plan: LayerPlan,
    rotary: Rotary,
    x: Tensor,
    rotation: HeadRotation,
    heads: list[int],
    which: Side,
    own: Tensor,
    behind: bool,
) -> Tensor:
    """Return the vectors of some heads as the hook must return them."""
    given = rotation.patch(which)
    if given is None:
        return rotation.turned_on(x, which, own, rotary, tables=bool(plan.table))
    check_patch(f"{which}_rot", given, x)
    given = rotation.kept(given[:, :, heads].to(x.device), rotary, which)
    if behind:
        return given
    # In float64, so that turning back and rotating again gives the same vectors.
    angles = plan.table.angles(rotary, plan.table.places(which, own, len(x)))
    return turn(given.double(), -angles[..., None, :], rotary.pairing, 1 / rotary.attention_factor)
