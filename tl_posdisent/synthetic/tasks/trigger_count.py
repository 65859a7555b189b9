"""Task 2 of arXiv 2505.13027: the number of triggers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tl_posdisent.utils.validation import check_fields, check_integer

from .task import IGNORED, Samples, Task, uniform


@dataclass(frozen=True)
class TriggerCount(Task):
    """Task: the number of triggers. Positions do not matter.

    A text of ``min_length`` to ``max_length`` tokens has ``min_count`` to ``max_count`` triggers of ``n_triggers``
    kinds (ids 1 … ``n_triggers``) at random positions. The label is their number minus ``min_count``; number and length
    are uniform and independent. The default sizes are those of arXiv 2505.13027 (for all its settings, see
    ``preset("paper")``).

    Attributes:
        d_vocab: number of token ids, including padding (0) and triggers.
        n_triggers: number of kinds of triggers.
        min_count, max_count: bounds for the number of triggers in a text.
        min_length, max_length: bounds for the number of tokens of a text, at least ``max_count``.
        n_ctx: padded length, at least ``max_length``.
        ignore_zero: whether loss and accuracy ignore texts without a trigger: their label is -100.
        n_logits: value of ``n_out``; default one per number of triggers.

    Example:
        >>> from tl_posdisent.synthetic import TriggerCount
        >>> task = TriggerCount(d_vocab=9, n_triggers=2, max_count=4, min_length=5, max_length=6, n_ctx=6)
        >>> tokens, labels = task.batch(2, seed=0)
        >>> for text, label in zip(tokens.tolist(), labels.tolist()):
        ...     print(text, label)
        [1, 6, 1, 4, 1, 2] 4
        [2, 1, 1, 6, 2, 0] 4
    """

    d_vocab: int = 574
    n_triggers: int = 30
    min_count: int = 0
    max_count: int = 100
    min_length: int = 100
    max_length: int = 120
    n_ctx: int = 128
    ignore_zero: bool = False
    n_logits: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, least={"min_count": 0, "max_count": 0})
        check_integer("d_vocab", self.d_vocab, self.n_triggers + 2, why="padding, n_triggers and a filler")
        self._check_range("count", 0)
        self._check_range("length", max(1, self.max_count), why="max_count triggers must have room")
        check_integer("n_ctx", self.n_ctx, self.max_length, why="max_length, the longest text")
        check_integer("max_count", self.max_count, int(self._ignores), why="a number of triggers that is not ignored")
        if self.n_logits is not None:
            least = self.max_count - self.min_count + 1
            check_integer("n_logits", self.n_logits, least, why="one per number of triggers")

    @property
    def _ignores(self) -> bool:
        return self.ignore_zero and self.min_count == 0

    @property
    def n_out(self) -> int:
        return self.n_logits or self.max_count - self.min_count + 1

    @property
    def chance(self) -> float:
        return 1 / (self.max_count - self.min_count + 1 - self._ignores)

    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        count = uniform(self.min_count, self.max_count, (n,), generator)
        length = uniform(self.min_length, self.max_length, (n,), generator)
        tokens = uniform(self.n_triggers + 1, self.d_vocab - 1, (n, self.n_ctx), generator)
        triggers = uniform(1, self.n_triggers, (n, self.n_ctx), generator)
        place = torch.arange(self.n_ctx)
        keys = torch.rand(n, self.n_ctx, generator=generator)
        order = keys.masked_fill_(place >= length[:, None], 2.0).argsort(-1)  # positions in random order
        chosen = torch.zeros(n, self.n_ctx, dtype=torch.bool)
        chosen.scatter_(1, order, place < count[:, None])
        label = count - self.min_count
        if self._ignores:
            label = label.masked_fill(count == 0, IGNORED)
        return self._padded(torch.where(chosen, triggers, tokens), length), label
