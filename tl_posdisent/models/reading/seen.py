"""What a pass showed in one layer, at the hooks of its attention."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posdisent.additive.score_checks import is_pattern
from tl_posdisent.models.reading.spec import AttentionSpec, masked_below
from tl_posdisent.utils.precision import mismatch

Seen = dict[str, Tensor]
"""Tensors recorded in one layer during one pass, by short hook name."""


def shows_scores(seen: Seen) -> bool:
    """Say whether the hook of the scores carries scores: in some classes it carries the pattern."""
    scores, pattern = seen.get("hook_attn_scores"), seen.get("hook_pattern")
    return scores is not None and not (is_pattern(scores) or (pattern is not None and torch.equal(scores, pattern)))


def visible_cells(seen: Seen) -> Bool[Tensor, "query key"] | None:
    """Find the cells that any head of any text attends to: the mask of the probe's text, which fits do not use.

    It is read from the scores if they are shown, since a sharp softmax leaves zeros without any mask.
    """
    scores, pattern = seen.get("hook_attn_scores"), seen.get("hook_pattern")
    attended = None if pattern is None else (pattern > 0).flatten(0, -3).any(0)
    if scores is None or not shows_scores(seen):
        return attended
    visible = (scores > masked_score(seen)).flatten(0, -3).any(0)
    if pattern is None or attended is None or torch.equal(visible, attended):
        return visible
    return visible if is_softmax(pattern, scores, visible) else attended  # some models show unmasked scores


def shows_mask(seen: Seen) -> bool:
    """Say whether the scores show which cells are masked: in some models the mask is applied behind their hook."""
    if not shows_scores(seen):
        return False
    shown = (seen["hook_attn_scores"] > masked_score(seen)).flatten(0, -3).any(0)
    visible = visible_cells(seen)
    return visible is None or torch.equal(visible, shown)


def is_softmax(pattern: Tensor, scores: Tensor, visible: Bool[Tensor, "query key"]) -> bool:
    """Say whether the pattern is the softmax of these scores, up to the share of a row that attention sinks take."""
    wanted = scores.double().masked_fill(~visible, -torch.inf).softmax(-1)
    shared = pattern.double() / pattern.double().sum(-1, keepdim=True)
    return mismatch(shared.to(pattern.dtype), wanted) <= 1


def masked_score(seen: Seen) -> float:
    """Return the value at or below which a cell of this pass is masked."""
    return masked_below(*(seen[name].dtype for name in ("hook_attn_scores", "hook_q", "hook_v") if name in seen))


def is_mask(visible: Tensor | None, causal: bool, window: int | None) -> bool:
    """Say whether the visible cells are those of a causal or full mask with this window."""
    if visible is None:
        return True
    layer = AttentionSpec(0, "", 1, 1, 1, causal, window)
    return torch.equal(visible, layer.mask(len(visible), visible.device))
