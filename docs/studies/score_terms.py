"""Why do an induction head and a previous-token head look where they look? Beside other heads of their layers and
another text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pandas as pd
import torch
from shared.heads_explained import N, Question
from shared.speeches import three_parts
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import ScoreSources

HEADS = {"induction": (18, 6), "previous token": (16, 0)}
TEXTS = {"induction": ("repeated", "not repeated"), "previous token": ("speech", "random tokens")}
CHOOSING, MEASURED, SOURCES = range(4), range(4, 12), 3  # draws, and sources of either side
PIECES = ["term", "content", "distance_below_32", "distance_from_32"]


def table(model: Any, heads: dict[str, tuple[int, int]] | None = None) -> pd.DataFrame:
    """Per question, text and head of the layer: pieces of the difference of both keys' scores, eight draws; of the head
    itself also single sources, chosen on four other draws, and by how much the difference falls without them."""
    speeches, reading = three_parts(model)[:, : 1 + 2 * N], tp.read_model(model)
    rows = []
    for name, (layer, head) in (heads or HEADS).items():
        question = Question(reading, name, layer, head, speeches)
        place = {"question": name, "layer": layer}
        rows += [place | row for row in (*all_sources(question), *single_sources(question))]
    return pd.DataFrame(rows)


def all_sources(question: Question) -> Iterator[dict[str, Any]]:
    """For each text and each head of the layer."""
    for text in TEXTS[question.name]:
        for head in range(question.reading.model.cfg.n_heads):
            terms = [sources.terms("key")[0].sum(1) for sources in question.explain(text, MEASURED, head)]
            yield {"text": text, "head": head} | mean_terms(terms)


def single_sources(question: Question) -> Iterator[dict[str, Any]]:
    """For the sources of the largest mean terms of either side; heads among them, and the next head of the layer of
    each, as a control, are removed as well."""
    text, head = TEXTS[question.name][0], question.head
    chosen = question.explain(text, CHOOSING, head)
    sides = [(side, name) for side in ("query", "key") for name in largest_terms(chosen, side)]
    heads = dict.fromkeys(name for _, name in sides if "H" in name)
    remove = list(dict.fromkeys([*heads, *(next_head(name, question.reading.model.cfg.n_heads) for name in heads)]))
    draws = question.explain(text, MEASURED, head, remove)
    for side, name in [*sides, *(("source", name) for name in remove)]:
        source = draws[0].sources.index(name)
        row = {"text": text, "head": head, "side": side, "source": name}
        row |= mean_terms([sources.terms(side)[0, :, source] for sources in draws])
        if side == "source":
            falls = torch.cat([sources.removed[name] for sources in draws])
            row |= {"removed": falls.mean().item(), "removed_se": falls.std().item() / len(falls) ** 0.5}
        yield row


def largest_terms(draws: Sequence[ScoreSources], side: Literal["query", "key"]) -> list[str]:
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
