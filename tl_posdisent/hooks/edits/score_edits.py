"""Edits of a head's scores and of its output z.

They act after all edits of the rotation, in a fixed order: the Λ-mask hides keys, then components of another run are
put in, then scores are replaced, then components are dropped. Last, ablation replaces the head's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.hooks.edits.edit import Edit
from tl_posdisent.hooks.edits.head_edits import HeadRotation
from tl_posdisent.models.reading.spec import AttentionSpec


@dataclass(frozen=True)
class View:
    """What an edit may read in a forward pass: some heads of one layer, which share all rotation edits."""

    spec: AttentionSpec
    heads: Sequence[int]
    inside: Bool[Tensor, "*lead query key"]  # where a query sees a key, padding left out; broadcasts to the scores
    rotation: HeadRotation  # none unless vectors are requested
    # The scores under all rotation edits and earlier score edits: in the model's dtype, soft cap included, arbitrary
    # outside the mask.
    scores: Float[Tensor, "batch head query key"]
    # Queries and keys before rotation, keys repeated for every query head that reads them; None unless requested.
    vectors: Any


class Order(IntEnum):
    """The order in which the edits of one head act."""

    HIDE = 0
    PATCH = 1
    REPLACE = 2
    COMPONENT = 3


@dataclass(frozen=True, eq=False)
class ScoreEdit(Edit):
    """What one call of a function does to the scores of the heads that it names."""

    edit: Callable[[View], Tensor]  # returns new scores, used inside the mask only; -inf hides a key
    order: Order
    vectors: bool = False  # whether it reads queries and keys
    by_place: bool = False  # whether it depends on where a text begins in its row
    hides: bool = False  # whether it hides keys by scores of its own, so that no component of them can be fitted
    plain: bool = False  # needs the real distances: combines only with frequency limits and interpolation
    components: frozenset[str] = frozenset()  # components that a patch puts in


@dataclass(frozen=True, eq=False)
class ResultEdit(Edit):
    """Replacement of heads' output at ``hook_z``: maps ``(layer, heads, z [batch, pos, head, d_head])`` to new z."""

    replace: Callable[[int, Sequence[int], Tensor], Tensor]
    by_slot: bool = False  # whether it was given for slots of a whole text
    of_others: bool = False  # whether a text gets what another text of the batch has
