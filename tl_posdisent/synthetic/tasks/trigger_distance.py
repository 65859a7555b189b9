"""Task 1 of arXiv 2505.13027: the distance between two triggers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tl_posdisent.utils.validation import check_fields, check_integer

from .task import Samples, Task, distinct, uniform


@dataclass(frozen=True)
class TriggerDistance(Task):
    """Task: the distance between two triggers. Only positions determine the answer.

    A text consists of ``before`` fillers, a trigger (id 1), ``gap`` fillers, the trigger again, and ``after`` fillers.
    The three numbers are uniform and independent; fillers are uniform over the other ids. The label is
    ``gap - min_gap``. Texts with a wider gap are longer: see ``from_length``. The default sizes are those of arXiv
    2505.13027.

    Attributes:
        d_vocab: number of token ids, including padding (0) and triggers.
        min_gap, max_gap, min_side, max_side: bounds for the number of tokens between the triggers, and on each side; 0
            or more.
        n_ctx: padded length, at least ``2 * max_side + max_gap + 2``, or ``max_length``.
        two_triggers: whether the second trigger is another token, id 2.
        stray_triggers: whether fillers may be triggers: they are then uniform over all ids except the padding.
        repeats: whether a filler may occur twice before, between or after the triggers.
        max_length: length to which longer texts are cut, after the second trigger; None for no cut.
        first_label: label of the narrowest gap.
        n_logits: value of ``n_out``; default the largest label plus one.

    Example:
        >>> from tl_posdisent.synthetic import TriggerDistance
        >>> task = TriggerDistance(d_vocab=9, min_gap=1, max_gap=3, min_side=0, max_side=1, n_ctx=7)
        >>> tokens, labels = task.batch(2, seed=0)
        >>> for text, label in zip(tokens.tolist(), labels.tolist()):
        ...     print(text, label)
        [8, 1, 6, 7, 4, 1, 3] 2
        [1, 4, 1, 6, 0, 0, 0] 0
    """

    d_vocab: int = 574
    min_gap: int = 1
    max_gap: int = 70
    min_side: int = 1
    max_side: int = 25
    n_ctx: int = 128
    two_triggers: bool = False
    stray_triggers: bool = False
    repeats: bool = True
    max_length: int | None = None
    first_label: int = 0
    n_logits: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, least={"min_gap": 0, "max_gap": 0, "min_side": 0, "max_side": 0, "first_label": 0})
        check_integer("d_vocab", self.d_vocab, 3 + self.two_triggers, why="padding, triggers and a filler")
        self._check_range("gap", 0)
        self._check_range("side", 0)
        longest = self._longest
        if self.max_length is not None:
            least = self.max_side + self.max_gap + 2
            check_integer("max_length", self.max_length, least, why="max_side + max_gap + 2, up to the second trigger")
            longest = min(longest, self.max_length)
        check_integer("n_ctx", self.n_ctx, longest, why="the longest text: 2 * max_side + max_gap + 2, or max_length")
        if self.n_logits is not None:
            check_integer("n_logits", self.n_logits, self.first_label + self.gaps, why="the largest label and one")
        if not self.repeats:
            least = max(self.max_gap, self.max_side) + self._first_filler
            check_integer("d_vocab", self.d_vocab, least, why="as many fillers as a segment has, with repeats=False")

    @property
    def gaps(self) -> int:
        """Number of gaps, and of labels."""
        return self.max_gap - self.min_gap + 1

    @property
    def n_out(self) -> int:
        return self.n_logits or self.first_label + self.gaps

    @property
    def chance(self) -> float:
        return 1 / self.gaps

    @property
    def _first_filler(self) -> int:
        return 1 if self.stray_triggers else 2 + self.two_triggers

    @property
    def _longest(self) -> int:
        """Length of the longest text before it is cut."""
        return 2 * self.max_side + self.max_gap + 2

    @property
    def from_length(self) -> float:
        """Accuracy of the best guess from the length of the text alone; ``chance`` is that of a constant guess."""
        sides = torch.arange(self.min_side, self.max_side + 1)
        gap, *around = torch.cartesian_prod(torch.arange(self.gaps), sides, sides).T
        length = gap + sum(around)  # plus the triggers, which all texts have
        if self.max_length is not None:
            length = length.clamp(max=self.max_length - self.min_gap - 2)
        counts = torch.bincount(length * self.gaps + gap, minlength=(int(length.max()) + 1) * self.gaps)
        return int(counts.view(-1, self.gaps).amax(1).sum()) / int(counts.sum())

    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        gap = uniform(self.min_gap, self.max_gap, (n,), generator)
        before, after = (uniform(self.min_side, self.max_side, (n,), generator) for _ in range(2))
        fillers, second = (self._first_filler, self.d_vocab - 1), before + gap + 1
        place = torch.arange(max(self.n_ctx, self._longest))
        if self.repeats:
            tokens = uniform(*fillers, (n, len(place)), generator)
        else:
            # Each segment takes the first fillers from a row of its own table of distinct fillers.
            segments = ((torch.zeros_like(gap), self.max_side), (before + 1, self.max_gap), (second + 1, self.max_side))
            tokens = torch.zeros(n, len(place), dtype=torch.int64)
            for start, width in segments:
                table = distinct(*fillers, (n, max(1, width)), generator)
                within = (place - start[:, None]).clamp(0, table.shape[1] - 1)
                tokens = torch.where(place >= start[:, None], table.gather(1, within), tokens)
        tokens.scatter_(1, torch.stack([before, second], -1), 1)
        if self.two_triggers:
            tokens.scatter_(1, second[:, None], 2)
        length = second + after + 1
        if self.max_length is not None:
            length = length.clamp(max=self.max_length)
        return self._padded(tokens, length)[:, : self.n_ctx], gap - self.min_gap + self.first_label
