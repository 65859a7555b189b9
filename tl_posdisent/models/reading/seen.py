"""What a pass showed in one layer, at the hooks of its attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posdisent.additive.score_checks import is_pattern
from tl_posdisent.models.reading.geometry import Geometry
from tl_posdisent.models.reading.spec import masked_below
from tl_posdisent.utils.precision import mismatch


@dataclass(frozen=True, eq=False)
class Seen(Mapping[str, Tensor]):
    """The tensors of one layer in one pass, by short hook name, and what they show of its mask, computed once."""

    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def lowest(self) -> float:
        """The value at or below which a cell of this pass is masked."""
        return masked_below(*(self[name].dtype for name in ("hook_attn_scores", "hook_q", "hook_v") if name in self))

    @cached_property
    def shows_scores(self) -> bool:
        """Whether the hook of the scores carries scores: in some classes it carries the pattern."""
        scores, pattern = self.get("hook_attn_scores"), self.get("hook_pattern")
        return scores is not None and not (is_pattern(scores) or (pattern is not None and torch.equal(scores, pattern)))

    @cached_property
    def unmasked(self) -> Bool[Tensor, "query key"] | None:
        """The cells that the scores of any head of any text show as not masked; None if scores are not shown."""
        return (self["hook_attn_scores"] > self.lowest).flatten(0, -3).any(0) if self.shows_scores else None

    @cached_property
    def visible(self) -> Bool[Tensor, "query key"] | None:
        """The cells that any head of any text attends to: the mask of the probe's text, which fits do not use.

        It is read from the scores if they are shown, since a sharp softmax leaves zeros without any mask.
        """
        pattern, unmasked = self.get("hook_pattern"), self.unmasked
        attended = None if pattern is None else (pattern > 0).flatten(0, -3).any(0)
        if unmasked is None:
            return attended
        if pattern is None or attended is None or torch.equal(unmasked, attended):
            return unmasked
        # Some models show scores before they are masked.
        return unmasked if is_softmax(pattern, self["hook_attn_scores"], unmasked) else attended

    @cached_property
    def shows_mask(self) -> bool:
        """Whether the scores show which cells are masked: in some models the mask is applied behind their hook."""
        return self.unmasked is not None and self.visible is not None and torch.equal(self.visible, self.unmasked)


def is_softmax(pattern: Tensor, scores: Tensor, visible: Bool[Tensor, "query key"]) -> bool:
    """Say whether the pattern is the softmax of these scores, up to the share of a row that attention sinks take."""
    wanted = scores.double().masked_fill(~visible, -torch.inf).softmax(-1)
    shared = pattern.double() / pattern.double().sum(-1, keepdim=True)
    return mismatch(shared.to(pattern.dtype), wanted) <= 1


def is_mask(visible: Tensor | None, causal: bool, window: int | None) -> bool:
    """Say whether the visible cells are those of a causal or full mask with this window."""
    if visible is None:
        return True
    layer = Geometry(1, 1, 1, causal, window)
    return torch.equal(visible, layer.mask(len(visible), visible.device))
