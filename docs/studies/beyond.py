"""Where does the loss begin to rise beyond the training length?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from shared.rows import Row, row
from shared.texts import Source, whole
from torch import Tensor
from transformers import DynamicCache

TRAINED = 8192
EDGES = [TRAINED - 1024, TRAINED, 9728, 10240, 10752, 11264]
TEXTS, PART = 3, 512


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The loss of three texts minus that of the same tokens where the first half of the training length is left out, so
    that no position is beyond it."""
    if not applies(model, source):
        return
    ids = model.to_tokens(whole("wikitext"), truncate=False)
    rest = ids[0, 1:].split(EDGES[-1] - 1)[:TEXTS]
    differences = torch.stack([difference(model, torch.cat([ids[0, :1], part])[None]) for part in rest])
    for start, stop in pairwise(EDGES):
        added = differences[:, start - TRAINED // 2 : stop - TRAINED // 2].mean(1)
        call = "model(tokens); loss minus that of the same tokens at earlier positions"
        yield row(f"loss added by the position, {start} to {stop}", added, EDGES[-1], call)


def applies(model: Any, source: Source) -> bool:
    """Only WikiText has texts beyond the training length, and only of models with a short one."""
    return source == "wikitext" and model.cfg.n_ctx <= TRAINED


def difference(model: Any, tokens: Tensor) -> Tensor:
    """``[position - TRAINED / 2]``: loss of a text's tokens minus that at positions which are TRAINED / 2 earlier."""
    half = TRAINED // 2
    shorter = torch.cat([tokens[:, :1], tokens[:, half + 1 :]], 1)
    return in_parts(model, tokens)[half:] - in_parts(model, shorter)


@torch.no_grad()
def in_parts(model: Any, tokens: Tensor) -> Tensor:
    """``[pos - 1]`` nats, against a KV cache."""
    losses, cache = [], DynamicCache()
    for start in range(0, tokens.shape[1], PART):
        logits = model(tokens[:, start : start + PART], use_cache=True, past_key_values=cache)[0].float()
        targets = tokens[0, start + 1 : start + 1 + PART]
        losses.append(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none"))
    return torch.cat(losses)
