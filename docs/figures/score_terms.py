"""Why two heads look where they look: `score_sources` of an induction head and a previous-token head, beside the other
heads of their layers and another text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
import trained_and_random
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import ScoreSources
from tl_posdisent.models import ModelReading

HEADS = {"induction": (18, 6), "previous token": (16, 0)}
TEXTS = {"induction": ("repeated", "not repeated"), "previous token": ("speech", "random tokens")}
N, APART = 48, 8  # tokens of a copy; positions between the key and the one that it is compared with
CHOOSING, MEASURED, SOURCES = range(4), range(4, 12), 3  # draws, and sources of either side
PIECES = ["term", "content", "distance_below_32", "distance_from_32"]


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
        found = []
        for draw in draws:
            x = example(self.reading.model, self.name, text, draw, self.speeches[draw % len(self.speeches)])
            options = {"against": x.against, "wavelengths": [32], "remove": remove}
            found.append(tp.score_sources(self.reading, x.tokens, self.layer, head, x.query, x.key, **options))
        return found

    def all_sources(self) -> Iterator[dict[str, Any]]:
        """For each text and each head of the layer."""
        for text in TEXTS[self.name]:
            for head in range(self.reading.model.cfg.n_heads):
                found = self.explain(text, MEASURED, head)
                yield {"text": text, "head": head} | _means([each.terms("key")[0].sum(1) for each in found])

    def single_sources(self) -> Iterator[dict[str, Any]]:
        """For the sources of the largest mean terms of either side; heads among them, and the next head of the layer of
        each, as a control, are removed as well."""
        text = TEXTS[self.name][0]
        place, chosen = {"text": text, "head": self.head}, self.explain(text, CHOOSING, self.head)
        sides = [(side, name) for side in ("query", "key") for name in _largest(chosen, side)]
        heads = dict.fromkeys(name for _, name in sides if "H" in name)
        remove = list(dict.fromkeys([*heads, *(_next(name, self.reading.model.cfg.n_heads) for name in heads)]))
        found = self.explain(text, MEASURED, self.head, remove)
        for side, name in [*sides, *(("source", name) for name in remove)]:
            at = found[0].sources.index(name)
            row = place | {"side": side, "source": name} | _means([each.terms(side)[0, :, at] for each in found])
            if side == "source":
                falls = torch.cat([each.removed[name] for each in found])
                row |= {"removed": falls.mean().item(), "removed_se": falls.std().item() / len(falls) ** 0.5}
            yield row


def score_terms(model: Any, heads: dict[str, tuple[int, int]] | None = None) -> pd.DataFrame:
    """Per question, text and head of the layer: pieces of the difference of both keys' scores, eight draws; of the head
    itself also single sources, chosen on four other draws, and by how much the difference falls without them."""
    speeches, reading = trained_and_random.texts(model)[:, : 1 + 2 * N], tp.read_model(model)
    rows = []
    for name, (layer, head) in (heads or HEADS).items():
        question = Question(reading, name, layer, head, speeches)
        place = {"question": name, "layer": layer}
        rows += [place | row for row in (*question.all_sources(), *question.single_sources())]
    return pd.DataFrame(rows)


def _largest(found: Sequence[ScoreSources], side: Literal["query", "key"]) -> list[str]:
    terms = torch.stack([each.terms(side)[0].sum(0) for each in found]).mean(0)
    return [found[0].sources[at] for at in terms.abs().argsort(descending=True)[:SOURCES].tolist()]


def _next(head: str, n_heads: int) -> str:
    """``"L16H0"`` to ``"L16H1"``."""
    layer, number = head.removeprefix("L").split("H")
    return f"L{layer}H{(int(number) + 1) % n_heads}"


def _means(draws: Sequence[Tensor]) -> dict[str, float]:
    """Mean over draws of the sum of the pieces and of each piece, and the standard error of the sum."""
    pieces = torch.stack([*draws])
    total = torch.cat([pieces.sum(1, keepdim=True), pieces], 1)
    means = dict(zip(PIECES, total.mean(0).tolist(), strict=True))
    return means | {"se": total[:, 0].std().item() / len(total) ** 0.5, "draws": len(total)}
