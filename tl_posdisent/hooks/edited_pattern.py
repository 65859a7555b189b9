"""Check that a model attends by edited scores: its pattern is their softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.models.capture import of_heads
from tl_posdisent.models.reading.spec import AttentionSpec

_EXACT = 1e-5  # a weight of attention in float32; the softmax of scores that differ by hundreds is less exact


@dataclass(frozen=True, eq=False)
class EditedRows:
    """Some rows of the edited scores of each text and head.

    Attributes:
        heads: the edited heads.
        rows: which queries'.
        scores: the rows, in the model's dtype.
    """

    heads: Sequence[int]
    rows: Int[Tensor, "batch head row"]
    scores: Float[Tensor, "batch head row key"]

    @torch.no_grad()
    def check(self, spec: AttentionSpec, pattern: Float[Tensor, "batch all_heads query key"]) -> None:
        """Raise unless the pattern is the softmax of the edited scores, times what a learned sink leaves."""
        shown = _rows_of(of_heads(pattern.detach(), self.heads), self.rows)
        shown = shown.to(torch.promote_types(shown.dtype, torch.float32))
        weights = self.scores.to(shown.dtype).softmax(-1).nan_to_num(0.0)  # a query without keys is padding
        expected = weights * shown.sum(-1, keepdim=True)
        allowed = 4 * torch.finfo(pattern.dtype).eps * expected + _EXACT
        if not bool(((shown - expected).abs() <= allowed).all()):
            raise ValueError(
                f"the pattern of layer {spec.layer} of {spec.architecture} is not the softmax of its edited scores: "
                "the model does not use them, or other hooks act on its scores or pattern"
            )


@torch.no_grad()
def edited_rows(
    heads: Sequence[int],
    scores: Float[Tensor, "batch all_heads query key"],
    new: Float[Tensor, "batch all_heads query key"],
    *,
    every: bool,
) -> EditedRows:
    """Choose for each text and head a query whose scores were edited: the last, if they were; or take ``every`` one."""
    before, after = (of_heads(x.detach(), heads) for x in (scores, new))
    slots = torch.arange(scores.shape[-2], device=scores.device)
    if every:
        rows = slots.expand(*after.shape[:2], -1)
    elif bool((after[:, :, -1] != before[:, :, -1]).any(-1).all()):
        rows = slots[-1:].expand(*after.shape[:2], 1)
    else:
        rows = ((after != before).any(-1) * slots).amax(-1, keepdim=True)
    return EditedRows(heads, rows, _rows_of(after, rows))


def _rows_of(
    x: Float[Tensor, "batch head query key"], rows: Int[Tensor, "batch head row"]
) -> Float[Tensor, "batch head row key"]:
    return x.gather(2, rows[..., None].expand(*rows.shape, x.shape[-1]))
