"""Parts of speeches of 2001 to 2021, each behind its BOS, and random tokens that are read twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared.texts import documents

LENGTH, SPEECHES = 256, 10
COPY = 48  # tokens of a copy


def beginnings(model: Any, n: int, skip: int = 0) -> Tensor:
    """``[n, 256]``: the beginnings of n speeches."""
    return torch.stack([model.to_tokens(speech)[0, :LENGTH] for speech in documents("speeches")[skip : skip + n]])


def three_parts(model: Any) -> Tensor:
    """``[30, 256]``: the first parts of ten speeches, then the second, then the third."""
    ids, rest = [model.to_tokens(speech)[0] for speech in documents("speeches")[:SPEECHES]], LENGTH - 1
    parts = [torch.cat([row[:1], row[1 + n * rest : 1 + (n + 1) * rest]]) for n in range(3) for row in ids]
    return torch.stack(parts)


def copies(model: Any, n: int, size: int = COPY, seed: int = 0) -> Tensor:
    """``[n, 1 + 2 * size]``: random tokens twice, behind the BOS."""
    drawn = torch.randint(1000, model.cfg.d_vocab, (n, size), generator=torch.Generator().manual_seed(seed))
    return torch.cat([model.to_tokens("")[:, :1].expand(n, 1), drawn, drawn], 1)
