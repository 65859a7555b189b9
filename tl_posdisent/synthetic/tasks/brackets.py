"""A task of brackets: whether they are balanced, or how deeply they are nested."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.utils.validation import check_fields, check_integer

from .task import Samples, Task, uniform


@dataclass(frozen=True)
class Brackets(Task):
    """Task: whether brackets are balanced, or how deeply they are nested. Their order determines the answer.

    A text has ``min_pairs`` to ``max_pairs`` opening brackets (id 1) and as many closing ones (id 2); their number is
    uniform.

    * ``question="balanced"``: the label is 1 if every closing bracket closes an opening one, else 0, each in half of
      the texts. Texts of both labels are uniform among those that begin with an opening bracket and end with a closing
      one, so neither the length, nor the number of each bracket, nor the two ends tell the label.
    * ``question="depth"``: texts are uniform among the balanced ones, and the label is the greatest number of open
      brackets, minus one. Longer texts are nested more deeply: see ``from_length``.

    Attributes:
        min_pairs, max_pairs: bounds for the number of pairs; at least 1, or 3 with ``question="balanced"``.
        n_ctx: padded length, at least ``2 * max_pairs``.
        question: what the label says.
        d_vocab: 3, the padding and two brackets; not an argument.

    Example:
        >>> from tl_posdisent.synthetic import Brackets
        >>> for question in ("balanced", "depth"):
        ...     tokens, labels = Brackets(min_pairs=3, max_pairs=5, n_ctx=10, question=question).batch(3, seed=1)
        ...     for text, label in zip(tokens.tolist(), labels.tolist()):
        ...         print("".join(" ()"[token] for token in text).strip(), label)
        ()()()() 1
        ())())((() 0
        ())(() 0
        ()()()() 0
        ((((())))) 4
        ()()() 0
    """

    min_pairs: int = 50
    max_pairs: int = 60
    n_ctx: int = 128
    question: Literal["balanced", "depth"] = "balanced"
    d_vocab: int = field(default=3, init=False)

    def __post_init__(self) -> None:
        check_fields(self)
        balanced = self.question == "balanced"
        why = "with fewer, texts that begin with ( and end with ) are balanced" if balanced else ""
        self._check_range("pairs", 3 if balanced else 1, why=why)
        check_integer("n_ctx", self.n_ctx, 2 * self.max_pairs, why="2 * max_pairs, the longest text")

    @property
    def n_out(self) -> int:
        return 2 if self.question == "balanced" else self.max_pairs

    @property
    def chance(self) -> float:
        """Accuracy of the best constant guess."""
        return 0.5 if self.question == "balanced" else float(self._depths.mean(0).max())

    @property
    def from_length(self) -> float:
        """Accuracy of the best guess from the length of the text alone; ``chance`` is that of a constant guess."""
        return 0.5 if self.question == "balanced" else float(self._depths.max(1).mean())

    @property
    def _depths(self) -> Float[np.ndarray, "pairs depth"]:
        """Shares of the greatest depths 1, 2, … among balanced texts with each number of pairs.

        The balanced texts of n pairs with depths up to h are walks of 2n steps on a path of h + 1 nodes, from its end
        to its end: ``2 / (h + 2) · Σ_k sin²(kπ / (h + 2)) · (2 cos(kπ / (h + 2)))^2n`` with k from 1 to h + 1.
        """
        pairs = np.arange(self.min_pairs, self.max_pairs + 1)[:, None, None]
        depth = np.arange(self.max_pairs + 1)[:, None]
        k = np.arange(1, self.max_pairs + 2)
        angle = np.where(k <= depth + 1, k * np.pi / (depth + 2), 0.0)
        # Powers of cos alone, because those of 2 cos exceed float64 in long texts.
        walks = (2 / (depth[:, 0] + 2)) * (np.sin(angle) ** 2 * np.cos(angle) ** (2 * pairs)).sum(-1)
        shares: Float[np.ndarray, "pairs depth"] = np.diff(walks, axis=1) / walks[:, -1:]
        return shares

    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        pairs = uniform(self.min_pairs, self.max_pairs, (n,), generator)
        balanced = _balanced(pairs, self.n_ctx, generator)
        if self.question == "depth":
            return _tokens(balanced), balanced.cumsum(1).amax(1) - 1
        label = uniform(0, 1, (n,), generator)
        return _tokens(torch.where(label[:, None] == 1, balanced, _unbalanced(pairs, self.n_ctx, generator))), label


def _tokens(steps: Int[Tensor, "n pos"]) -> Int[Tensor, "n pos"]:
    """Opening brackets (1) where a step is 1, closing ones (2) where it is -1, padding (0) where it is 0."""
    return steps.remainder(3)


def _steps(
    up: Int[Tensor, " n"], length: Int[Tensor, " n"], width: int, generator: torch.Generator
) -> Int[Tensor, "n pos"]:
    """Draw steps of 1 and -1 in random order, ``up`` of them 1, and zeros after ``length`` steps."""
    place = torch.arange(width)
    after = place >= length[:, None]
    keys = torch.rand(len(up), width, generator=generator)
    order = keys.masked_fill(after, 2.0).argsort(-1)
    steps = torch.full_like(order, -1).scatter_(1, order, 2 * (place < up[:, None]).long() - 1)
    return steps.masked_fill_(after, 0)


def _balanced(pairs: Int[Tensor, " n"], width: int, generator: torch.Generator) -> Int[Tensor, "n pos"]:
    """Draw steps uniformly among those that never go below 0 and end there.

    By the cycle lemma, of the rotations of n steps up and n + 1 down exactly one does so before its last step: the one
    that begins after the first of the lowest points.
    """
    length = 2 * pairs[:, None] + 1
    steps = _steps(pairs, length[:, 0], width + 1, generator)
    begin = steps.cumsum(1).argmin(1, keepdim=True) + 1  # zeros after the text are no lower, and later
    place = torch.arange(width)
    return steps.gather(1, (begin + place) % length).masked_fill_(place >= length - 1, 0)


def _unbalanced(pairs: Int[Tensor, " n"], width: int, generator: torch.Generator) -> Int[Tensor, "n pos"]:
    """Draw steps uniformly among those that begin with 1, end with -1 and at 0, and go below 0.

    Between the two ends they reach -2. By the reflection principle these are the steps that end at -4, with all steps
    after the first -2 reversed.
    """
    steps = _steps(pairs - 3, 2 * pairs - 2, width - 2, generator)
    reached = (steps.cumsum(1) == -2).cumsum(1) > 0
    before = torch.cat([torch.zeros_like(reached[:, :1]), reached[:, :-1]], 1)
    whole = torch.nn.functional.pad(torch.where(before, -steps, steps), (1, 1))
    whole[:, 0] = 1
    return whole.scatter_(1, 2 * pairs[:, None] - 1, -1)
