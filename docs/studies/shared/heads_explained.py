"""A head, what it is known to look at, and texts in which ``score_sources`` explains why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import ScoreSources
from tl_posdisent.models import ModelReading

N, APART = 48, 8  # tokens of a copy; positions between the key and the one that it is compared with


@dataclass(frozen=True)
class Example:
    """A text, a query in it, the key that the head is known to look at, and another key."""

    tokens: Tensor
    query: int
    key: int
    against: int


def example(model: Any, question: str, text: str, draw: int, speech: Tensor) -> Example:
    """Draw random tokens twice, or others before them: the key follows the first occurrence of the query's token, the
    other key is 8 before or after it. Or take a speech, or random tokens: the key is the one before the query."""
    generator = torch.Generator().manual_seed(draw)
    first, second = torch.randint(1000, model.cfg.d_vocab, (2, N), generator=generator)
    if question == "induction":
        query = 1 + N + int(torch.randint(APART, N - 2 * APART, (), generator=generator))
        tokens = torch.cat([speech[:1], first if text == "repeated" else second, first])
        key = query - N + 1
        return Example(tokens[None], query, key, key + (-1) ** draw * APART)
    tokens = speech if text == "speech" else torch.cat([speech[:1], first, second])
    query = len(tokens) - 1 - int(torch.randint(APART, (), generator=generator))
    return Example(tokens[None], query, query - 1, query - 1 - APART)


@dataclass(frozen=True)
class Question:
    """A head of a model and what it is known to look at, with speeches."""

    reading: ModelReading
    name: str
    layer: int
    head: int
    speeches: Tensor

    def explain(self, text: str, draws: Iterable[int], head: int, remove: Sequence[str] = ()) -> list[ScoreSources]:
        """Explain why a head of the layer has another score at the key than at the other key, in each draw."""
        sources = []
        for draw in draws:
            x = example(self.reading.model, self.name, text, draw, self.speeches[draw % len(self.speeches)])
            options = {"against": x.against, "wavelengths": [32], "remove": remove}
            sources.append(tp.score_sources(self.reading, x.tokens, self.layer, head, x.query, x.key, **options))
        return sources
