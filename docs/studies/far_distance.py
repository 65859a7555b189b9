"""Which distances must a model tell apart? Sixteen stay exact, and all others become one far distance.

A limit, ``d.clamp(max=16)``, changes two things: far keys are no longer told apart, and they look near. With the far
distance free, each is changed alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row, losses, row
from shared.texts import Source, how_many, parts, random_tokens, repeated
from torch import Tensor

import tl_posdisent as tp

EXACT, FAR = 16, 255
LENGTH, LONG = 256, 1024


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The loss added by the far distance, by what the text asks for."""
    for kind, (texts, first) in kinds(model, source).items():
        length = texts.shape[1]
        base = losses(model, texts, first=first)
        for name, hooks in changes(model, length).items():
            added = losses(model, texts, hooks, first) - base
            yield row(f"added loss, {name}, {kind}", added, length, "remap_distance(model, function)")


def kinds(model: Any, source: Source) -> dict[str, tuple[Tensor, int]]:
    """Texts, and the first position whose loss counts. The first token of a copy cannot be copied: nothing says that a
    copy begins. Random tokens have no source; they are measured with the speeches."""
    prose = parts(model, source, how_many(model, source, 8), LENGTH)
    long = parts(model, source, how_many(model, source, 4), LONG)
    by_name = {"prose": (prose, 1), "prose, second half of 1024": (long, LONG // 2)}
    copied = {"a passage": repeated(prose[:4])}
    if source == "speeches":
        copied["1024 random tokens"] = repeated(random_tokens(model, 2, LONG))
    return by_name | {f"second copy of {what}": (texts, texts.shape[1] // 2 + 2) for what, texts in copied.items()}


def changes(model: Any, length: int) -> dict[str, Any]:
    """Hooks by name. A control keeps the order of far keys, but near."""
    by_name = {
        f"{EXACT} exact, others {far}": tp.remap_distance(model, lambda d, far=far: torch.where(d > EXACT, far, d))
        for far in (EXACT, FAR, length * 3 // 4)
    }
    squeezed = tp.remap_distance(
        model, lambda d: torch.where(d > EXACT, EXACT + (d - EXACT) * 48 / (length - EXACT), d)
    )
    return by_name | {f"{EXACT} exact, others in 16 to 64": squeezed}
