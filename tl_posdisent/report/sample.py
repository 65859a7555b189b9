"""What each section reads: fewer tokens where each run is a forward pass, and a sample of heads of a large model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

import numpy as np
import pandas as pd

from .subject import POSITIONS, TOKENS, Subject

READ = {"perturbation": (512, 1024), "ablation": (128, 512), "ladder": (128, 1024)}
"""Positions of each text, and tokens altogether, of sections that read less than the report."""
PASSES = {"ablation": 0.53, "ladder": 5.0}
"""Forward passes for each head, as measured on 30 layers of 9 heads."""
BUDGET = 3e12
"""Multiplications in all forward passes of such a section: parameters × tokens × passes × heads. A minute or two on a
processor; for models of a few million parameters that is more than all heads need."""
LEAST = 12
"""Heads that are always measured."""
_ENDS = (  # column of a table by head, and what its largest values are
    ("share_distance", "whose scores the distance explains best"),
    ("share_key", "whose scores the key explains best"),
    ("effect", "without which the loss rises most"),
)


def texts_of(name: str, subject: Subject) -> Subject:
    """The subject with the texts that a section reads."""
    positions, tokens = READ.get(name, (POSITIONS, TOKENS))
    return subject.some(min(subject.lengths) if name == "distance" else positions, tokens)


def affordable(name: str, subject: Subject) -> int:
    """How many heads of the subject a section measures."""
    if name not in PASSES:
        return len(subject.pairs)
    each = PASSES[name] * subject.parameters() * sum(texts_of(name, subject).lengths)
    return min(len(subject.pairs), max(LEAST, int(BUDGET / each)))


def narrowed(name: str, subject: Subject, tables: Mapping[str, pd.DataFrame], seed: int) -> Subject:
    """The texts that a section reads, and the heads that it measures: all, or a sample within its budget.

    A sixth of a sample each are the heads with the highest values of what ``tables`` have; the others are drawn.
    """
    part, n = texts_of(name, subject), affordable(name, subject)
    if n == len(subject.pairs):
        return part
    chosen: list[tuple[int, int]] = []
    said: list[str] = []
    for column, what in _ENDS:
        for table in (table for table in tables.values() if column in table):
            ranked = table.dropna(subset=column).sort_values(column, ascending=False, kind="stable")
            pairs = [(int(layer), int(head)) for layer, head in zip(ranked["layer"], ranked["head"], strict=True)]
            new = [pair for pair in pairs if pair in subject.pairs and pair not in chosen][: n // 6]
            chosen += new
            said += [f"{len(new)} {what}"] if new else []
    drawn = _spread([pair for pair in subject.pairs if pair not in chosen], n - len(chosen), seed)
    said.append(f"{len(drawn)} drawn from all layers with seed {seed}")
    how = f"Measured on {n} of the {len(subject.pairs)} heads: {', '.join(said)}."
    return part.only([*chosen, *drawn], how)


def _spread(pairs: list[tuple[int, int]], n: int, seed: int) -> list[tuple[int, int]]:
    """Heads drawn one after another from each layer, layers in random order."""
    random = np.random.default_rng(seed)
    layers: dict[int, list[tuple[int, int]]] = {}
    for index in random.permutation(len(pairs)):
        layers.setdefault(pairs[index][0], []).append(pairs[index])
    rounds = zip_longest(*layers.values())
    return [pair for some in rounds for pair in some if pair is not None][:n]
