"""Why do an induction head and a previous-token head look where they look? Beside other heads of their layers and
another text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from shared.speeches import three_parts
from torch import Tensor

import tl_posdisent as tp

HEADS = {"induction": (18, 6), "previous token": (16, 0)}
TEXTS = {"induction": ("repeated", "not repeated"), "previous token": ("speech", "random tokens")}
CHOOSING, MEASURED, SOURCES = range(4), range(4, 12), 3  # draws, and sources of either side
N, APART = 48, 8  # tokens of a copy; positions between the key and the one that it is compared with
PIECES = ["term", "content", "distance_below_32", "distance_from_32"]


def table(model: Any, heads: dict[str, tuple[int, int]] | None = None) -> pd.DataFrame:
    """Per question, text and head of the layer: pieces of the difference of both keys' scores, eight draws; of the head
    itself also single sources, chosen on four other draws, and by how much the difference falls without them."""
    reading, speeches = tp.read_model(model), three_parts(model)[:, : 1 + 2 * N]
    rows = []
    for question, (layer, head) in (heads or HEADS).items():
        place = {"question": question, "layer": layer}
        for text in TEXTS[question]:
            examples = [example(model, question, text, draw, speeches) for draw in MEASURED]
            for other in range(model.cfg.n_heads):
                terms = [explained(reading, x, layer, other).terms("key")[0].sum(1) for x in examples]
                rows.append(place | {"text": text, "head": other} | mean_terms(terms))
        rows += [place | row for row in single_sources(reading, question, layer, head, speeches)]
    return pd.DataFrame(rows)


def single_sources(reading: Any, question: str, layer: int, head: int, speeches: Tensor) -> Iterator[dict[str, Any]]:
    """The sources of the largest mean terms of either side; heads among them, and the next head of the layer of each,
    as a control, are removed as well."""
    text, n_heads = TEXTS[question][0], reading.model.cfg.n_heads
    first, then = ([example(reading.model, question, text, draw, speeches) for draw in x] for x in (CHOOSING, MEASURED))
    chosen = [explained(reading, x, layer, head) for x in first]
    sides = [(side, name) for side in ("query", "key") for name in largest_terms(chosen, side)]
    heads = dict.fromkeys(name for _, name in sides if "H" in name)
    remove = list(dict.fromkeys([*heads, *(next_head(name, n_heads) for name in heads)]))
    draws = [explained(reading, x, layer, head, remove) for x in then]
    for side, name in [*sides, *(("source", name) for name in remove)]:
        source = draws[0].sources.index(name)
        row = {"text": text, "head": head, "side": side, "source": name}
        row |= mean_terms([sources.terms(side)[0, :, source] for sources in draws])
        if side == "source":
            falls = torch.cat([sources.removed[name] for sources in draws])
            row |= {"removed": falls.mean().item(), "removed_se": falls.std().item() / len(falls) ** 0.5}
        yield row


def example(model: Any, question: str, text: str, draw: int, speeches: Tensor) -> tuple[Tensor, int, int, int]:
    """A text, a query, the key that the head is known to look at, and another key.

    Random tokens twice, or others before them: the key follows the first occurrence of the query's token, the other key
    is 8 before or after it. Or a speech, or random tokens: the key is the one before the query."""
    generator, speech = torch.Generator().manual_seed(draw), speeches[draw % len(speeches)]
    first, second = torch.randint(1000, model.cfg.d_vocab, (2, N), generator=generator)
    if question == "induction":
        query = 1 + N + int(torch.randint(APART, N - 2 * APART, (), generator=generator))
        tokens = torch.cat([speech[:1], first if text == "repeated" else second, first])
        return tokens[None], query, query - N + 1, query - N + 1 + (-1) ** draw * APART
    tokens = speech if text == "speech" else torch.cat([speech[:1], first, second])
    query = len(tokens) - 1 - int(torch.randint(APART, (), generator=generator))
    return tokens[None], query, query - 1, query - 1 - APART


def explained(reading: Any, x: tuple[Tensor, int, int, int], layer: int, head: int, remove: Sequence[str] = ()) -> Any:
    tokens, query, key, against = x
    options: dict[str, Any] = {"against": against, "wavelengths": [32], "remove": remove}
    return tp.score_sources(reading, tokens, (layer, head), query, key, **options)


def largest_terms(draws: Sequence[Any], side: str) -> list[str]:
    """The sources of the largest mean terms."""
    terms = torch.stack([sources.terms(side)[0].sum(0) for sources in draws]).mean(0)
    return [draws[0].sources[place] for place in terms.abs().argsort(descending=True)[:SOURCES].tolist()]


def next_head(head: str, n_heads: int) -> str:
    """``"L16H0"`` to ``"L16H1"``."""
    layer, number = head.removeprefix("L").split("H")
    return f"L{layer}H{(int(number) + 1) % n_heads}"


def mean_terms(draws: Sequence[Tensor]) -> dict[str, float]:
    """Mean over draws of the sum of the pieces and of each piece, and the standard error of the sum."""
    pieces = torch.stack([*draws])
    total = torch.cat([pieces.sum(1, keepdim=True), pieces], 1)
    means = dict(zip(PIECES, total.mean(0).tolist(), strict=True))
    return means | {"se": total[:, 0].std().item() / len(total) ** 0.5, "draws": len(total)}
