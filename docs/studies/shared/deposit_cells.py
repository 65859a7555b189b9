"""Models of six layers of 16 heads: which are trained, in which order."""

from __future__ import annotations

from collections.abc import Sequence

from shared.deposits import HEADS, ROTATING
from tl_posdisent.synthetic import preset

MEDIUM, PAPER = preset("medium"), preset("paper")
STEPS = {("distance", "sinusoidal_rope"): 1200, ("distance", "rope"): 2000, ("count", "sinusoidal_rope"): 900}
FIRST = (*ROTATING, "sinusoidal")
Cell = tuple[str, str, str, int, int]


def cell(size: str, task: str, encoding: str, seed: int = 0) -> Cell:
    """Name a model of which all heads rotate, if the encoding does."""
    return size, task, encoding, HEADS * (encoding in ROTATING), seed


def cells() -> list[Cell]:
    """Every encoding on 16 gaps, then more seeds and other gaps of three, then the rest; one and two rotary heads a
    layer; and models of the paper's size."""
    others = range(1, 5)
    parts: list[tuple[int, tuple[str, ...], Sequence[int]]] = [(16, MEDIUM.encodings, [0]), (16, FIRST, others)]
    parts += [(32, FIRST, [0]), (8, FIRST, others), (32, FIRST, others), (70, FIRST, [0])]
    parts += [(n, MEDIUM.encodings, range(5)) for n in (8, 16, 32, 70)]
    models = [cell("medium", f"gap{n}", x, seed) for n, names, seeds in parts for seed in seeds for x in names]
    models += [("medium", "gap16", name, n, seed) for seed in range(3) for name in ROTATING for n in (1, 2)]
    return list(dict.fromkeys(models + [cell("paper", *key) for key in STEPS]))
