"""The part of a text that is in the KV cache: what the hooks of a layer must remember of it between passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass
class CachedText:
    """What is known of the text in the KV cache."""

    texts: int = 0
    n_key: int = 0  # keys in the cache
    seen: int = 0  # tokens so far, of which a sliding window may have forgotten some
    places: Tensor | None = None  # positions of these tokens, where they were found out
    counted: Tensor | None = None  # which tokens of their texts they are, where that is needed
    keys: Tensor | None = None  # unrotated; the last alone, by which one knows the text again, if no more are needed
    given: Tensor | None = None  # keys as hooks turned them for the wrong positions, where a pass then fell back
    values: Tensor | None = None  # where results are put together anew

    def holds(self, texts: int, cached: int, window: int | None) -> bool:
        """Whether it is the beginning of a text of which so many keys come from a cache."""
        forgotten = window is not None and min(self.n_key, window - 1) <= cached
        return self.texts == texts and (self.n_key == cached or forgotten)


def last_of(before: Tensor | None, now: Tensor, n_key: int) -> Tensor:
    """The last ``n_key`` vectors of a text, or as many as are known; a sliding window forgets the first."""
    known = now if before is None or now.shape[1] >= n_key else torch.cat([before, now], 1)
    return known[:, -n_key:]


def before_and_now(
    positions: Int[Tensor, "*batch query"], n_key: int, before: Int[Tensor, "*batch seen"] | None = None
) -> Int[Tensor, "*batch key"]:
    """Positions of all keys, of which the last are those of the queries.

    Those in a KV cache had the positions ``before``, or else count up to the first.
    """
    cached = n_key - positions.shape[-1]
    if cached <= 0:
        return positions
    if before is not None and before.shape[-1] >= cached:
        return joined(before, positions)[..., -n_key:]
    steps = torch.arange(cached, 0, -1, device=positions.device)
    return torch.cat([(positions[..., :1] - steps).clamp_min(0), positions], -1)


def joined(before: Int[Tensor, "*batch seen"], now: Int[Tensor, "*batch new"]) -> Int[Tensor, "*batch seen+new"]:
    """Join numbers of tokens; the result has a row for each text if either has."""
    if before.ndim != now.ndim:
        texts = len(now if now.ndim == 2 else before)
        before, now = (x.expand(texts, -1) for x in (before, now))
    return torch.cat([before, now], -1)


def so_far(before: Tensor | None, now: Tensor | None, *, continued: bool) -> Tensor | None:
    """Numbers of the tokens of a text after this part of it, if they are known for all."""
    if now is None or not continued:
        return now
    return None if before is None else joined(before, now)
