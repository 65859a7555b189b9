"""Search for the heads with the largest divergences, without a run for every head.

Curvatures rank heads well, but may be ten times too small for one of them. So the heads of a layer that are not run
alone are changed together, in one run: unless heads cancel, none of them diverges more alone. Where that leaves room
for one of the largest, the layer's next heads by curvature are run alone, and those that remain together again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf, isnan, log10, nan
from typing import Any

import numpy as np

from tl_posdisent.utils.words import plural

Head = tuple[int, int]
"""Layer and head."""
Target = tuple[int, int | tuple[int, ...]]
"""Layer, and the head or heads that are changed."""

_NOTHING = 1e-7  # nats: divergences of float32 predictions below this are rounding


@dataclass(frozen=True, eq=False)
class HeadSearch:
    """The search under one intervention: ``next_runs`` and ``note`` in turn, until there are no more runs.

    Attributes:
        ranks: estimates by which heads are run first.
        joint: from a layer and some of its heads to the estimated divergence if these are changed together.
        largest: number of largest divergences to find.
        most: maximum number of heads run alone, besides one run for each layer.
        bounded: whether runs have divergences.
        alone: divergences of heads that were run alone.
        together: by layer, the divergence if all its heads that were not run alone are changed together.
    """

    ranks: Mapping[Head, float]
    joint: Callable[[int, Sequence[int]], float]
    largest: int
    most: int
    bounded: bool
    alone: dict[Head, float] = field(default_factory=dict)
    together: dict[int, float] = field(default_factory=dict)

    def next_runs(self) -> list[Target]:
        """Return the heads to run alone, and the other heads of the same layers to run together."""
        if not self.largest:
            return []
        if not (self.alone or self.together):  # at first all layers
            layers = list(dict.fromkeys(layer for layer, _ in self.ranks))
            some = self._by_rank(self.ranks)[: min(4 * self.largest, self.most)]
        else:
            allowed = max(0, self.most - len(self.alone))
            some = [head for layer in self._open() for head in self._next_heads(layer)][:allowed]
            layers = list(dict.fromkeys(layer for layer, _ in some))
        runs: list[Target] = [*some]
        for layer in layers if self.bounded else []:
            rest = [head for head in self._remaining(layer) if head not in some]
            runs += [(layer, tuple(head for _, head in rest))] if len(rest) > 1 else rest
        return runs

    def note(self, divergences: Mapping[Target, float]) -> None:
        """Note the divergences of runs that ``next_runs`` returned."""
        for (layer, heads), divergence in divergences.items():
            if isinstance(heads, tuple):
                self.together[layer] = divergence
            else:
                self.alone[layer, heads] = divergence

    @property
    def bound(self) -> float:
        """The largest divergence of heads that were run together; 0 if each was run alone, NaN if none was run."""
        left = [self.together.get(layer, nan) for layer, _ in self._remaining()]
        return float(np.max(left)) if left else 0.0

    @property
    def cancelling(self) -> list[int]:
        """Layers whose remaining heads diverge less together than one of them alone, by estimates: without a bound."""
        layers = dict.fromkeys(layer for layer, _ in self._remaining())
        return [layer for layer in layers if self._cancel(layer)]

    @property
    def statement(self) -> str:
        """What was found, and what no other head can exceed."""
        n, run = len(self.ranks), len(self.alone)
        if run == n:
            return f"all {plural(n, 'head')} were run" if n > 1 else "the only head was run"
        text = f"{run} of {plural(n, 'head')} were run"
        if isnan(self.bound):
            return text + (", and nothing limits the effects of the others" if run else "")
        text += (
            f"; no other head alone diverges by more than {_rounded_up(self.bound):g} nats per prediction, unless "
            "heads of one layer cancel"
        )
        if cancelling := self.cancelling:
            layers = "layer" if len(cancelling) == 1 else "layers"
            text += f", which estimates show in {layers} {', '.join(map(str, cancelling))}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers and the statement."""
        return {
            "heads": len(self.ranks),
            "run": len(self.alone),
            "bound": self.bound,
            "cancelling": self.cancelling,
            "statement": self.statement,
        }

    def _remaining(self, layer: int | None = None) -> list[Head]:
        """Heads (of a layer) that were not run alone, the largest estimates first."""
        return self._by_rank(x for x in self.ranks if x not in self.alone and layer in (None, x[0]))

    def _by_rank(self, heads: Any) -> list[Head]:
        return sorted(heads, key=lambda head: -self.ranks[head])

    @property
    def _least(self) -> float:
        """The smallest of the largest divergences that were found."""
        found = sorted(self.alone.values(), reverse=True)
        return max(found[: self.largest][-1], _NOTHING) if len(found) >= self.largest else _NOTHING

    def _open(self) -> list[int]:
        """Layers whose remaining heads may have one of the largest divergences, the largest first."""
        layers = {layer for layer, _ in self._remaining()}
        left = {x: inf if self._cancel(x) else self.together.get(x, 0.0) for x in layers}
        return sorted((x for x in left if left[x] >= self._least), key=lambda x: -left[x])

    def _next_heads(self, layer: int) -> list[Head]:
        """Return as many heads of an open layer as could each have one of the largest divergences, if these add up."""
        remaining = self._remaining(layer)
        n = len(remaining) if self._cancel(layer) else int(self.together[layer] / self._least)
        return remaining[: max(1, n)]

    def _cancel(self, layer: int) -> bool:
        """Say whether the estimates of a layer's remaining heads together are less than that of one alone."""
        remaining = self._remaining(layer)
        if len(remaining) < 2:
            return False
        largest = self.ranks[remaining[0]]
        return largest > _NOTHING and self.joint(layer, [head for _, head in remaining]) < largest / 2


def _rounded_up(x: float) -> float:
    """Round up to two digits, so that a bound stays one.

    >>> _rounded_up(0.0192548), _rounded_up(0.31), _rounded_up(0.0)
    (0.02, 0.31, 0.0)
    """
    if x <= 0:
        return 0.0
    unit = 10.0 ** (floor(log10(x)) - 1)
    return ceil(x / unit - 1e-9) * unit
