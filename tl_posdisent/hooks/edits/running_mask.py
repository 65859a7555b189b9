"""Read the attention mask of a running text from a layer's scores, and where a text may start and end in it.

Hooks do not see ``attention_mask``, only which cells are masked. Padding is a block of slots at the beginning of a row
whose keys no later token sees, or at its end whose keys no token sees. Nothing else is: a token that does not see
itself, or a key that some tokens do not see, is masked and counts like any other.

The first keys may be hidden from all later tokens without being padding (knocked-out keys, packed texts). Positions
tell these apart if they begin at 0 after the block. If they do not, edits whose result depends on it are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.models.reading.spec import AttentionSpec


@dataclass(frozen=True)
class RunningMask:
    """The mask of a pass in one layer, read from its scores as far as it is needed.

    Attributes:
        scores: those of the pass, or zeros for one head in a model that does not show them.
        masked_below: a cell is masked if its score is at or below this value.
        allowed: the cells in which the layer's own mask lets a query see a key.
        shows_mask: whether the scores show all cells that are masked.
    """

    scores: Float[Tensor, "batch head query key"]
    masked_below: float
    allowed: Bool[Tensor, "query key"]
    shows_mask: bool

    @cached_property
    def visible(self) -> Bool[Tensor, "batch head query key"]:
        """The cells in which a query sees a key."""
        visible = ~(self.scores <= self.masked_below)  # NaN is no mask
        return visible if self.shows_mask else visible & self.allowed

    @cached_property
    def seen(self) -> Bool[Tensor, "batch query key"]:
        """The cells in which any head sees a key."""
        seen = ~(self.scores.amax(1) <= self.masked_below)
        return seen if self.shows_mask else seen & self.allowed

    @cached_property
    def starts(self) -> Bool[Tensor, "batch key"]:
        """The keys at which a text may start after a block that may be padding.

        No query from there on sees a key before, though the layer's own mask would let it.
        """
        n_key = len(self.allowed)
        slot, first = torch.arange(n_key, device=self.seen.device), _earliest_from(self.seen)
        return (slot <= first) & (first < n_key) & (_earliest_from(self.allowed) < slot)

    @cached_property
    def after(self) -> Bool[Tensor, "batch query"]:
        """The queries at the padding after a text: the last slots, if no query sees their keys."""
        unseen = ~self.seen.any(1)
        return unseen.flip(-1).long().cumprod(-1).flip(-1).bool()

    @cached_property
    def of_text(self) -> Bool[Tensor, "batch head query key"]:
        """The visible cells without the queries at the padding after a text, which may see the text's keys."""
        return self.visible & ~self.after[:, None, :, None] if bool(self.after.any()) else self.visible

    @property
    def padding(self) -> Bool[Tensor, "batch query"]:
        """The queries at padding: those after a text, and the first ones, as long as they see no key."""
        idle = ~self.seen.any(-1)
        return idle.long().cumprod(-1).bool() | self.after


def running_mask(
    spec: AttentionSpec, scores: Float[Tensor, "batch head query key"], masked_below: float
) -> RunningMask:
    """Read the mask of a pass from a layer's scores."""
    allowed = spec.mask(scores.shape[-1], scores.device)
    return RunningMask(scores.detach(), masked_below, allowed, spec.limits.shows_mask)


def _earliest_from(cells: Bool[Tensor, "*batch query key"]) -> Int[Tensor, "*batch key"]:
    """Return, for each slot, the first key that any query from this slot on sees."""
    n_key = cells.shape[-1]
    first = torch.where(cells, torch.arange(n_key, device=cells.device), n_key).amin(-1)
    return first.flip(-1).cummin(-1).values.flip(-1)


def index_in_text(positions: Int[Tensor, "*texts key"], starts: Bool[Tensor, "batch key"]) -> Int[Tensor, "batch key"]:
    """Return the index of each token in its text: from the last start whose position is 0, or from the first slot."""
    slot = torch.arange(starts.shape[-1], device=starts.device)
    return slot - torch.where(starts & (positions == 0), slot, 0).cummax(-1).values


def other_indices(
    index: Int[Tensor, "*rows key"], positions: Int[Tensor, "*texts key"], starts: Bool[Tensor, "batch key"]
) -> Iterator[tuple[int, Int[Tensor, "*_ key"]]]:
    """Yield starts, and the indices that tokens have if the keys before are padding, where positions do not tell."""
    slot = torch.arange(starts.shape[-1], device=starts.device)
    unknown = starts & ~(starts & (positions == 0)).any(-1, keepdim=True)
    for start in unknown.any(0).nonzero()[:, 0].flip(0).tolist():
        yield start, index - start * (unknown[:, start, None] & (slot >= start))
