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

TRAINED, BEYOND = 8192, 11264  # tokens: of training, of one text in several ways, of three texts
EDGES = [TRAINED - 1024, TRAINED, 9728, 10240, 10752, BEYOND]
PART = 512


def rows(model: Any, source: Source) -> Iterator[Row]:
    """Where does the loss begin to rise? Three texts; the loss minus that of the same tokens where the first half of
    the training length is left out, so that no position is beyond it."""
    if not applies(model, source):
        return
    differences = torch.stack([difference(model, text) for text in range(3)])
    for start, stop in pairwise(EDGES):
        added = differences[:, start - TRAINED // 2 : stop - TRAINED // 2].mean(1)
        call = "model(tokens); loss minus that of the same tokens at earlier positions"
        yield row(f"loss added by the position, {start} to {stop}", added, BEYOND, call)


def difference(model: Any, text: int) -> Tensor:
    """``[position - TRAINED / 2]``: loss of a text's tokens minus that at positions which are TRAINED / 2 earlier."""
    ids, half = model.to_tokens(whole("wikitext"), truncate=False)[0], TRAINED // 2
    tokens = torch.cat([ids[:1], ids[1 + text * (BEYOND - 1) :][: BEYOND - 1]])[None]
    shorter = torch.cat([tokens[:, :1], tokens[:, half + 1 :]], 1)
    longer, part = (in_parts(model, x) for x in (tokens, shorter))
    return longer[half:] - part


def applies(model: Any, source: Source) -> bool:
    """Only WikiText has texts beyond the training length, and only of models with a short one."""
    return source == "wikitext" and model.cfg.n_ctx <= TRAINED


def in_parts(model: Any, tokens: Tensor) -> Tensor:
    """``[pos - 1]`` nats, against a KV cache."""
    losses, cache = [], DynamicCache()
    with torch.no_grad():
        for start in range(0, tokens.shape[1], PART):
            logits = model(tokens[:, start : start + PART], use_cache=True, past_key_values=cache)[0].float()
            targets = tokens[0, start + 1 : start + 1 + PART]
            losses.append(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none"))
    return torch.cat(losses)
