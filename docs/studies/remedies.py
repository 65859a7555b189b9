"""What do remedies change beyond the training length?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from beyond import TRAINED, applies, in_parts
from shared.rows import Row
from shared.texts import Source, whole
from torch import Tensor

import tl_posdisent as tp

LONGEST = 12288  # tokens: of training, of one text in several ways, of three texts
PART = 512


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The loss beyond the training length of one text of 12 288 tokens, plain and with remedies (40 GiB of memory)."""
    if not applies(model, source):
        return
    tokens = model.to_tokens(whole("wikitext"), truncate=False)[:, :LONGEST]
    ways: dict[str, list[Any]] = {
        "plain": [],
        "distances within the training length": tp.remap_distance(model, lambda d: d.clamp(max=TRAINED - 1)),
        "half of it and 4 sinks": tp.lambda_mask(model, 4, TRAINED // 2, TRAINED // 2),
        "positions divided by 1.5": tp.position_interpolation(model, 1.5),
    }
    for name, hooks in ways.items():
        losses = whole_text(model, tokens, hooks) if hooks else in_parts(model, tokens)
        loss = losses[TRAINED:].mean().item()
        yield Row(f"loss beyond the training length, {name}", loss, torch.nan, "1 text", LONGEST, "lambda_mask")


def whole_text(model: Any, tokens: Tensor, hooks: list[Any]) -> Tensor:
    """``[pos - 1]`` nats in one pass, as hooks need it."""
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks)[0, :-1]
    return torch.cat(
        [
            torch.nn.functional.cross_entropy(x.float(), y, reduction="none")
            for x, y in zip(logits.split(PART), tokens[0, 1:].split(PART), strict=True)
        ]
    )
