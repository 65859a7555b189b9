"""Read the attention mask of a running text from a layer's scores, and where a text may start and end in it.

Hooks do not see ``attention_mask``, only which cells are masked. Padding is a block of slots at the beginning of a row
whose keys no later token sees, or at its end whose keys no token sees. Nothing else is: a token that does not see
itself, or a key that some tokens do not see, is masked and counts like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.errors import ArgumentError


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
    def hides_start(self) -> Bool[Tensor, " batch"]:
        """The rows whose first keys no later query sees, though the layer's own mask would let it.

        They may be padding, other texts or keys that are knocked out: where the text begins is ambiguous.
        """
        n_key = len(self.allowed)
        slot, first = torch.arange(n_key, device=self.seen.device), _earliest_from(self.seen)
        return ((slot <= first) & (first < n_key) & (_earliest_from(self.allowed) < slot)).any(-1)

    @cached_property
    def after(self) -> Bool[Tensor, "batch query"]:
        """The queries at the padding after a text: the last slots, if no query sees their keys."""
        last = self.scores[..., -1].flatten(1).amax(1)
        if not bool((last <= self.masked_below).any()):  # no row ends with padding
            return torch.zeros_like(self.scores[:, 0, :, 0], dtype=torch.bool)
        unseen = ~self.seen.any(1)
        return unseen.flip(-1).long().cumprod(-1).flip(-1).bool()

    @cached_property
    def of_text(self) -> Bool[Tensor, "batch head query key"]:
        """The visible cells without the queries at the padding after a text, which may see the text's keys."""
        return self.visible & ~self.after[:, None, :, None] if bool(self.after.any()) else self.visible


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


def check_one_text(spec: AttentionSpec, inside: Bool[Tensor, "*lead query key"], tool: str) -> None:
    """Refuse several texts packed into one row, each masked from the others: scores are fitted text by text."""
    real = inside.diagonal(0, -2, -1)
    whole = spec.mask(inside.shape[-1], inside.device) & real[..., :, None] & real[..., None, :]
    if not torch.equal(whole, inside):
        raise ArgumentError(
            "attention_mask",
            f"must leave one text in each row for {tool}, got a mask that hides tokens of a text "
            "from each other, as of packed texts: pass them as a batch of texts",
        )
