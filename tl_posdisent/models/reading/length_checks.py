"""Find the length of text up to which a layer's rotation and scale hold: short texts at far positions.

Some models rotate by other frequencies beyond a length (longrope of Phi-3 and Phi-4, dynamic NTK), or scale scores by
the position (Llama 4). Ten tokens placed at the end of a long text show that without running one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.models.reading.attributes import lengths_of_note
from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.reading.observe import Seen, listen, misfit, short_name, visible_cells
from tl_posdisent.models.reading.spec import AttentionSpec


def check_lengths(model: Any, tokens: Tensor, specs: list[AttentionSpec], first: Sequence[Hook]) -> list[AttentionSpec]:
    """Set ``holds_to`` where rotation or scale change with the length; after these first edits."""
    explained = [spec for spec in specs if spec.problem is None and spec.q and spec.k]
    noted, farthest = lengths_of_note(model)
    n = tokens.shape[1]
    if not explained or farthest <= n or not hasattr(model, "original_model"):  # HookedTransformer: tables alone
        return specs

    @cache
    def held(length: int) -> dict[int, bool]:
        try:
            positions = torch.arange(length - n, length, device=tokens.device)
            more = {"position_ids": positions[None].expand(len(tokens), -1), "attention_mask": torch.ones_like(tokens)}
            seen = listen(model, tokens, [spec.layer for spec in explained], first, **more)
        except (RuntimeError, ValueError, TypeError, IndexError):  # a model that takes no positions
            return {spec.layer: True for spec in explained}
        return {spec.layer: _holds(spec, seen[spec.layer], positions) for spec in explained}

    def longest(layer: int) -> int | None:
        return _longest(lambda length: held(length)[layer], n, noted, farthest)

    found = {spec.layer: longest(spec.layer) for spec in explained}
    return [replace(spec, holds_to=found.get(spec.layer)) for spec in specs]


def _holds(spec: AttentionSpec, seen: Seen, positions: Tensor) -> bool:
    """Whether the layer's scores at these positions are those that were read at the beginning of a text."""
    assert spec.q
    assert spec.k
    visible = visible_cells(seen)
    q, k = (tap.read(seen[short_name(tap)]).double() for tap in (spec.q, spec.k))
    for places in (positions, positions - positions[0]):  # the latter of a model that does not heed them
        turned = spec.rotated(q, places), spec.rotated(k, places)
        if visible is None or misfit(spec, *turned, seen, visible) <= 1:
            return True
    return False


def _longest(holds: Callable[[int], bool], shortest: int, noted: Sequence[int], farthest: int) -> int | None:
    """The greatest length that holds; None if the farthest does."""
    if holds(farthest):
        return None
    low, high = shortest, farthest
    for length in sorted({x + more for x in noted for more in (-1, 0, 1)}):  # where models change, if they do
        if low < length < high:
            low, high = (length, high) if holds(length) else (low, length)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
