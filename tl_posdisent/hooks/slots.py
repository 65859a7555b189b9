"""Slots of a batch, chosen by index, range, slice or booleans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_indices, is_integer, listed, shown
from tl_posdisent.utils.words import plural

Slots = int | range | slice | Sequence[int] | Bool[Tensor, " pos"] | None
"""Slots of the batch, from 0, or from the end if negative; None for all."""

ChosenSlots = int | Sequence[int] | slice | Tensor | None


def checked_slots(name: str, chosen: Slots) -> ChosenSlots:
    """Validate chosen slots as far as that is possible without a text."""
    if chosen is None:
        return None
    if isinstance(chosen, slice):
        ends = [x for x in (chosen.start, chosen.stop, chosen.step) if x is not None]
        if not all(map(is_integer, ends)) or (chosen.step is not None and chosen.step < 1):
            raise ArgumentError(name, f"must be a slice of integers with a step of at least 1, got {chosen}")
        return chosen
    if isinstance(chosen, Tensor) and chosen.dtype == torch.bool:
        return chosen.clone()
    slots: Any = listed(name, chosen)
    indices = [slots] if is_integer(slots) else slots
    if not isinstance(indices, Sequence) or not all(is_integer(x) and abs(x) < 2**63 for x in indices):
        raise ArgumentError(name, f"must be integers of 64 bits, a range, a slice or booleans, got {shown(chosen)}")
    if not indices or len(set(indices)) < len(indices):
        raise ArgumentError(name, f"must name at least one and none twice, got {shown(chosen)}")
    checked: int | Sequence[int] = slots
    return checked  # compared with the text when the model runs


def slots_text(chosen: ChosenSlots) -> str:
    """Describe chosen slots in a few characters."""
    if isinstance(chosen, slice):
        ends = (chosen.start, chosen.stop) + (() if chosen.step is None else (chosen.step,))
        return ":".join("" if x is None else str(x) for x in ends)
    if isinstance(chosen, Tensor):
        return plural(int(chosen.sum()), "slot")
    if not isinstance(chosen, Sequence):
        return str(chosen)
    if len(chosen) > 2 and list(chosen) == list(range(chosen[0], chosen[-1] + 1)):
        return f"{chosen[0]}…{chosen[-1]}"
    return str(list(chosen)) if len(chosen) <= 4 else plural(len(chosen), "slot")


def slot_mask(name: str, chosen: ChosenSlots, length: int, device: torch.device) -> Bool[Tensor, " pos"]:
    """Mark the chosen slots of a text of this length."""
    mask = torch.zeros(length, dtype=torch.bool, device=device)
    if isinstance(chosen, Tensor):
        if chosen.shape != mask.shape:
            raise ArgumentError(name, f"must have shape (pos,) = ({length},) as booleans, got {tuple(chosen.shape)}")
        mask = chosen.to(device)
    else:
        mask[chosen if isinstance(chosen, slice) else check_indices(name, chosen, length)] = True
    if not bool(mask.any()):
        raise ArgumentError(name, f"must choose a slot of the running text, which has {length}, got none")
    return mask
