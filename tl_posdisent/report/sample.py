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


def narrowed(name: str, subject: Subject, seed: int) -> Subject:
    """The texts that a section reads, and the heads that it measures: all, or a random sample within its budget."""
    positions, tokens = READ.get(name, (POSITIONS, TOKENS))
    part = subject.some(min(subject.lengths) if name == "distance" else positions, tokens)
    each = PASSES.get(name, 0) * subject.parameters() * sum(part.lengths)
    n = max(LEAST, int(BUDGET / each)) if each else len(subject.pairs)
    if n >= len(subject.pairs):
        return part
    random = np.random.default_rng(seed)
    layers: dict[int, list[tuple[int, int]]] = {}
    for index in random.permutation(len(subject.pairs)):
        layers.setdefault(subject.pairs[index][0], []).append(subject.pairs[index])
    # One after another from each layer, layers in random order.
    drawn = [pair for some in zip_longest(*layers.values()) for pair in some if pair is not None][:n]
    how = f"Measured on {n} of the {len(subject.pairs)} heads, drawn from all layers with seed {seed}."
    return part.only(drawn, how)
