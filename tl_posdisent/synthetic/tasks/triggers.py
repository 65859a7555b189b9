"""The two tasks of arXiv 2505.13027: the distance between two triggers, and the number of triggers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .sampling import Samples, Task, texts, uniform, whole


@dataclass(frozen=True)
class TriggerDistance(Task):
    """Task: the distance between two triggers. Only positions give the answer.

    A text is ``before`` fillers, a trigger, ``gap`` fillers, the trigger again, ``after`` fillers. The label is
    ``gap - min_gap``. The defaults are the paper's sizes (1–70 tokens between the triggers,
    1–25 on each side, 574 tokens of vocabulary, padded to 128).

    ``gap``, ``before`` and ``after`` are uniform and independent, fillers uniform over the ids 2 … ``d_vocab - 1``, and
    the trigger is id 1; so labels are uniform. The paper does not specify this, nor whether its longest text has 120
    tokens or, as here, 122. Texts with a wider gap are longer, so the length predicts the label in part:
    ``from_length`` is the accuracy of a guess from the length alone.

    Attributes:
        d_vocab: token ids, the padding (0) and the trigger (1) among them.
        min_gap: fewest tokens between the triggers; 0 or more.
        max_gap: most.
        min_side: fewest tokens before the first trigger, and after the second; 0 or more.
        max_side: most.
        n_ctx: padded length, at least ``2 * max_side + max_gap + 2``.

    Raises:
        ValueError: sizes that do not fit each other.

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

    def __post_init__(self) -> None:
        whole("d_vocab", self.d_vocab, least=3, why="padding, trigger and a filler")
        whole("min_gap", self.min_gap, least=0)
        whole("max_gap", self.max_gap, least=self.min_gap, why="min_gap is the least")
        whole("min_side", self.min_side, least=0)
        whole("max_side", self.max_side, least=self.min_side, why="min_side is the least")
        longest = 2 * self.max_side + self.max_gap + 2
        whole("n_ctx", self.n_ctx, least=longest, why="2 * max_side + max_gap + 2, the longest text")

    @property
    def n_out(self) -> int:
        """One label per gap."""
        return self.max_gap - self.min_gap + 1

    @property
    def from_length(self) -> float:
        """Accuracy of the best guess that sees only how long the text is; a blind one has ``1 / n_out``."""
        sides = torch.ones(1, 1, self.max_side - self.min_side + 1)
        before_and_after = torch.nn.functional.conv1d(sides, sides, padding=sides.shape[-1] - 1)
        reach = before_and_after.flatten()
        best = torch.nn.functional.pad(reach, (self.n_out - 1, self.n_out - 1)).unfold(0, self.n_out, 1).amax(-1)
        return float(best.sum() / reach.sum() / self.n_out)

    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        gap = uniform(self.min_gap, self.max_gap, n, generator)
        before, after = (uniform(self.min_side, self.max_side, n, generator) for _ in range(2))
        tokens = texts(2, self.d_vocab - 1, n, self.n_ctx, generator)
        second = before + gap + 1
        tokens.scatter_(1, torch.stack([before, second], -1), 1)
        place = torch.arange(self.n_ctx, device=tokens.device)
        return tokens.masked_fill_(place > (second + after)[:, None], self.pad_id), gap - self.min_gap


@dataclass(frozen=True)
class TriggerCount(Task):
    """Task: the number of triggers. Positions do not matter.

    A text of ``min_length`` to ``max_length`` tokens has ``min_count`` to ``max_count`` triggers, of ``n_triggers``
    kinds, at random places. The label is their number minus ``min_count``. Defaults are the paper's sizes (30
    kinds, 0–100 occurrences, no text longer than 120, padded to 128).

    The number and the length are uniform and independent: every text is long enough for every number, so the length
    does not predict the label. Positions are uniform without repetition, kinds uniform over ids 1 … ``n_triggers``,
    fillers over the ids above. The paper does not specify any of this, nor the shortest length (100 here).

    Attributes:
        d_vocab: token ids, the padding (0) and the triggers among them.
        n_triggers: kinds of triggers.
        min_count: fewest triggers in a text.
        max_count: most.
        min_length: shortest text, at least ``max_count``.
        max_length: longest.
        n_ctx: padded length, at least ``max_length``.

    Raises:
        ValueError: sizes that do not fit each other.

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

    def __post_init__(self) -> None:
        whole("n_triggers", self.n_triggers, least=1)
        whole("d_vocab", self.d_vocab, least=self.n_triggers + 2, why="padding, n_triggers and a filler")
        whole("min_count", self.min_count, least=0)
        whole("max_count", self.max_count, least=self.min_count, why="min_count is the least")
        whole("min_length", self.min_length, least=max(1, self.max_count), why="max_count triggers must have room")
        whole("max_length", self.max_length, least=self.min_length, why="min_length is the least")
        whole("n_ctx", self.n_ctx, least=self.max_length, why="max_length, the longest text")

    @property
    def n_out(self) -> int:
        """One label per number of triggers."""
        return self.max_count - self.min_count + 1

    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        count = uniform(self.min_count, self.max_count, n, generator)
        length = uniform(self.min_length, self.max_length, n, generator)
        tokens = texts(self.n_triggers + 1, self.d_vocab - 1, n, self.n_ctx, generator)
        triggers = texts(1, self.n_triggers, n, self.n_ctx, generator)
        place = torch.arange(self.n_ctx, device=tokens.device)
        beyond = place >= length[:, None]
        lots = torch.rand(n, self.n_ctx, generator=generator, device=tokens.device).masked_fill_(beyond, 2.0)
        # By rank, not by a threshold: of two equal lots only one may win.
        wins = torch.zeros_like(beyond).scatter_(1, lots.argsort(-1), place < count[:, None])
        return torch.where(wins, triggers, tokens).masked_fill_(beyond, self.pad_id), count - self.min_count
