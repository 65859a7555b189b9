"""What each section reads: fewer tokens where each run is a forward pass, and a sample of heads of a large model."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

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


def narrowed(name: str, subject: Subject, seed: int) -> Subject:
    """The texts that a section reads, and the heads that it measures: all, or a random sample within its budget."""
    part, n = texts_of(name, subject), affordable(name, subject)
    if n == len(subject.pairs):
        return part
    how = f"Measured on {n} of the {len(subject.pairs)} heads, drawn from all layers with seed {seed}."
    return part.only(_spread(subject.pairs, n, seed), how)


def _spread(pairs: list[tuple[int, int]], n: int, seed: int) -> list[tuple[int, int]]:
    """Heads drawn one after another from each layer, layers in random order."""
    random = np.random.default_rng(seed)
    layers: dict[int, list[tuple[int, int]]] = {}
    for index in random.permutation(len(pairs)):
        layers.setdefault(pairs[index][0], []).append(pairs[index])
    rounds = zip_longest(*layers.values())
    return [pair for some in rounds for pair in some if pair is not None][:n]
