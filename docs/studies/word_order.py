"""Does the order of words still matter without rotation?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from shared.changes import Change, last_logits, of_layers, row
from shared.speeches import second_parts
from torch import Tensor

LENGTH = 256


def table(
    model: Any, texts: int = 4, orders: int = 2, length: int = LENGTH, kept: Sequence[int] = (1,)
) -> pd.DataFrame:
    """Does the order of words still matter? Loss of a token where those before it, but the last few, are shuffled,
    minus that where they are not; with and without rotation. Eight places in each text."""
    tokens, rows = second_parts(model, texts, length), list[dict[str, Any]]()
    places = torch.linspace(length // 4, length - 2, 8).long().tolist()
    positions = f"{places[0] + 1} to {places[-1] + 2}"
    for change in (Change("unchanged", "", torch.nan, []), of_layers(model, "all layers", range(model.cfg.n_layers))):
        base = last_losses(model, [tokens[:, : at + 1] for at in places], tokens[:, [at + 1 for at in places]], change)
        rows.append(row(change, "loss", positions, base.mean(1)))
        for n in kept:
            added = []
            for seed in range(orders):
                some = [shuffled(tokens[:, : at + 1], n, seed) for at in places]
                added.append(last_losses(model, some, tokens[:, [at + 1 for at in places]], change) - base)
            rows.append(
                row(change, f"added by shuffling all but the last {n}", positions, torch.stack(added).mean((0, 2)))
            )
    return pd.DataFrame(rows)


def last_losses(model: Any, contexts: Sequence[Tensor], targets: Tensor, change: Change) -> Tensor:
    """``[text, place]``: nats of the token after each context."""
    logits = torch.cat([last_logits(model, tokens, change.hooks) for tokens in contexts], 1)
    return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def shuffled(tokens: Tensor, kept: int, seed: int) -> Tensor:
    """``[text, pos]``: the tokens between the BOS and the last few in a random order."""
    stop = tokens.shape[1] - kept
    order = 1 + torch.randperm(stop - 1, generator=torch.Generator().manual_seed(seed))
    return torch.cat([tokens[:, :1], tokens[:, order], tokens[:, stop:]], 1)
