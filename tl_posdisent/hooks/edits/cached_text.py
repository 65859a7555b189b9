"""Positions of a running text, and the part of a text in the KV cache that the hooks of a layer must remember."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """Positions of the queries of a pass.

    Attributes:
        own: the model's own; None until they are known.
        counted: index of each query in its text, from 0, regardless of its position; None unless it is needed.
        at_slots: whether the model's own are the slots of the batch, 0, 1, 2 …, padding included.
    """

    own: Tensor | None = None
    counted: Tensor | None = None
    at_slots: bool = False


@dataclass(frozen=True)
class TextSoFar:
    """What is kept of a text in a KV cache for the pass that continues it; empty if no cache is in use.

    Attributes:
        texts, n_key: number of texts, and of keys in the cache, from which a sliding window may have dropped some.
        positions: of all its tokens.
        misplaced: whether keys were turned for other positions than the model's.
        keys: before rotation; only the last one, which identifies the text, if no more are needed.
        values: if results are put in.
    """

    texts: int = 0
    n_key: int = 0
    positions: Positions = Positions()
    misplaced: bool = False
    keys: Tensor | None = None
    values: Tensor | None = None

    def holds(self, texts: int, cached: int, window: int | None) -> bool:
        """Say whether this is the beginning of a text of which ``cached`` keys come from a cache."""
        forgotten = window is not None and min(self.n_key, window - 1) <= cached
        return self.texts == texts and (self.n_key == cached or forgotten)

    def continued_by(self, now: Positions) -> Positions:
        """Return the positions of this text and of what continues it."""
        before = self.positions
        return replace(now, own=_continued(before.own, now.own), counted=_continued(before.counted, now.counted))


def last_of(before: Tensor | None, now: Tensor, n_key: int) -> Tensor:
    """Return the last ``n_key`` vectors of a text, or as many as are known; a sliding window drops the first."""
    known = now if before is None or now.shape[1] >= n_key else torch.cat([before, now], 1)
    return known[:, -n_key:]


def before_and_now(
    positions: Int[Tensor, "*batch query"], n_key: int, before: Int[Tensor, "*texts seen"] | None = None
) -> Int[Tensor, "*_ key"]:
    """Return the positions of all keys, the last of which belong to the queries.

    Keys in a KV cache have the positions ``before``, or, if these are unknown, count up to the first query's.
    """
    cached = n_key - positions.shape[-1]
    if cached <= 0:
        return positions
    if before is not None and before.shape[-1] >= cached:
        return joined(before, positions)[..., -n_key:]
    steps = torch.arange(cached, 0, -1, device=positions.device)
    return torch.cat([(positions[..., :1] - steps).clamp_min(0), positions], -1)


def joined(before: Int[Tensor, "*_ seen"], now: Int[Tensor, "*_ new"]) -> Int[Tensor, "*_ seen+new"]:
    """Concatenate token indices; the result has a row for each text if either input has."""
    if before.ndim != now.ndim:
        texts = len(now if now.ndim == 2 else before)
        before, now = (x.expand(texts, -1) for x in (before, now))
    return torch.cat([before, now], -1)


def _continued(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    """Return the token indices of a text up to the end of this part, or None if some are unknown."""
    return None if before is None or now is None else joined(before, now)
