"""Which distances must a model tell apart? Those up to a number stay exact, and all others become one far distance.

A limit, ``d.clamp(max=16)``, changes two things: far keys are no longer told apart, and they look near. With the far
distance free, each is changed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from far_by_layer import far, squeezed
from shared.rows import Row, losses, row
from shared.texts import Source, how_many, parts, random_tokens, repeated
from torch import Tensor

import tl_posdisent as tp

EXACT, FAR = (4, 8, 16, 32), 255
LENGTH, LONG, LONGEST = 256, 1024, 2048


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The loss added by the number of exact distances and the far distance, by what the text asks for."""
    for kind, (texts, first) in kinds(model, source).items():
        length = texts.shape[1]
        exact = EXACT if source == "speeches" and length < LONGEST else (16,)
        base = losses(model, texts, first=first)
        yield row(f"loss, {kind}", base, length, f"positions from {first} on")
        for name, hooks in changes(model, length, exact).items():
            added = losses(model, texts, hooks, first) - base
            yield row(f"added loss, {name}, {kind}", added, length, "remap_distance(model, function)")


def kinds(model: Any, source: Source) -> dict[str, tuple[Tensor, int]]:
    """Texts, and the first position whose loss counts. The first token of a copy cannot be copied: nothing says that a
    copy begins. Random tokens have no source; they, the longest texts and other numbers of exact distances are measured
    with the speeches."""
    prose = parts(model, source, how_many(model, source, 8), LENGTH)
    long = parts(model, source, how_many(model, source, 4), LONG)
    by_name = {"prose": (prose, 1), "prose, second half of 1024": (long, LONG // 2)}
    copied = {"a passage": repeated(prose[:4])}
    if source == "speeches":
        by_name["prose, second half of 2048"] = parts(model, source, 2, LONGEST), LONGEST // 2
        copied["random tokens"] = repeated(random_tokens(model, 4, LENGTH))
        copied["1024 random tokens"] = repeated(random_tokens(model, 2, LONG))
    return by_name | {f"second copy of {what}": (texts, texts.shape[1] // 2 + 2) for what, texts in copied.items()}


def changes(model: Any, length: int, exact: Sequence[int]) -> dict[str, Any]:
    """Hooks by name. Two controls change one thing: far keys look near but stay apart, or are mixed up but stay far."""
    by_name = {f"{n} exact, others {d}": far(model, n, d) for n in exact for d in (n, FAR)}
    for distance in (64, length * 3 // 4):
        by_name[f"16 exact, others {distance}"] = far(model, 16, distance)
    mixed = torch.cat([torch.arange(17), 17 + torch.randperm(length, generator=torch.Generator().manual_seed(0))])
    by_name["16 exact, others in 16 to 64"] = squeezed(model, length)
    by_name["16 exact, others mixed up"] = tp.remap_distance(model, lambda d: mixed[d.long().clamp(min=0)].to(d))
    by_name["16 exact, others hidden but the first"] = tp.lambda_mask(model, 1, 17, length)
    return by_name
