"""The part of a text in the KV cache: what the hooks of a layer must remember of it between passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass
class CachedText:
    """What a layer's hooks remember of the text in the KV cache."""

    texts: int = 0
    n_key: int = 0  # keys in the cache
    seen: int = 0  # tokens so far; a sliding window may have dropped some from the cache
    places: Tensor | None = None  # positions of these tokens, if they were determined
    at_slots: bool = False  # whether these positions are the slots of the batch, padding included
    counted: Tensor | None = None  # index of each token in its text, if needed
    keys: Tensor | None = None  # unrotated; only the last one, which identifies the text, if no more are needed
    given: Tensor | None = None  # keys as hooks turned them for the wrong positions, if a pass then fell back
    values: Tensor | None = None  # if results are recomputed

    def holds(self, texts: int, cached: int, window: int | None) -> bool:
        """Say whether this is the beginning of a text of which ``cached`` keys come from a cache."""
        forgotten = window is not None and min(self.n_key, window - 1) <= cached
        return self.texts == texts and (self.n_key == cached or forgotten)

    def forget(self) -> None:
        """Release all tensors: the running pass keeps no cache, so that no pass can continue its text."""
        vars(self).update(vars(CachedText()))


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


def continued(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    """Return the token indices of a text up to the end of this part, or None if some are unknown."""
    return None if before is None or now is None else joined(before, now)
