"""Do heads of known kinds lie in the where–what plane where they must?"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from shared.speeches import copies

import tl_posdisent as tp

KINDS = ("previous_token", "duplicate_token", "induction", "first_token")
OTHERS = {"retrieval": "L19H1", "where": "L16H0", "sink": "L8H1", "unnamed": "L3H0"}
"""Heads of SmolLM2 that other studies found."""


def table(model: Any, each: int = 2, texts: int = 4, length: int = 97) -> pd.DataFrame:
    """The heads with the largest value of each measure of ``head_labels`` and a few others, all run, on random tokens
    that are read twice, with gaps of 4, 12, 20 … tokens between the copies, so that distances differ."""
    labels = tp.head_labels(model, seeds=0, progress=False)
    kinds: dict[str, str] = {}
    for kind in KINDS:
        largest = labels.nlargest(each, kind)
        kinds |= {f"L{layer}H{head}": kind for layer, head in zip(largest["layer"], largest["head"], strict=True)}
    kinds |= {label: kind for kind, label in OTHERS.items() if label not in kinds}
    tokens = with_gaps(copies(model, texts, length // 2))
    found = tp.where_or_what(model, tokens, heads=list(kinds), exact="all", progress=False)
    found.insert(0, "kind", [kinds[f"L{x}H{y}"] for x, y in zip(found["layer"], found["head"], strict=True)])
    return found


def with_gaps(tokens: torch.Tensor) -> torch.Tensor:
    """Put 4, 12, 20 … tokens of the second copy between the copies of each text, and cut them to one length."""
    size = (tokens.shape[1] - 1) // 2
    rows = []
    for n, text in enumerate(tokens):
        gap = 4 + 8 * n
        filling = tokens[(n + 1) % len(tokens), 1 : 1 + gap]
        rows.append(torch.cat([text[: 1 + size], filling, text[1 + size :]])[: tokens.shape[1]])
    return torch.stack(rows)
