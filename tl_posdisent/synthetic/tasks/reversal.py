"""A task of reversal: the token at the mirrored place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tl_posdisent.utils.validation import check_fields, check_integer

from .task import Samples, Task, uniform


@dataclass(frozen=True)
class Reversal(Task):
    """Task: the token at the mirrored place. Positions say which token, and content which one it is.

    A text has ``min_length`` to ``max_length`` tokens, one of which is a marker (id 1). With the marker at position i
    (from 0) of a text of n tokens, the label is the token at position n - 1 - i, minus 2. The length is uniform; the
    marker is at each place with the same probability, except in the middle, which mirrors itself; the other tokens are
    uniform, with ids from 2 on. Without positions, the best guess is the most frequent token of the text.

    Attributes:
        d_vocab: number of token ids, including padding (0) and the marker.
        min_length, max_length: bounds for the number of tokens of a text, 2 or more.
        n_ctx: padded length, at least ``max_length``.

    Example:
        >>> from tl_posdisent.synthetic import Reversal
        >>> task = Reversal(d_vocab=9, min_length=4, max_length=6, n_ctx=6)
        >>> tokens, labels = task.batch(2, seed=0)
        >>> for text, label in zip(tokens.tolist(), labels.tolist()):
        ...     print(text, label)
        [1, 4, 3, 4, 8, 5] 3
        [6, 1, 4, 2, 0, 0] 2
    """

    d_vocab: int = 574
    min_length: int = 100
    max_length: int = 120
    n_ctx: int = 128

    def __post_init__(self) -> None:
        check_fields(self)
        check_integer("d_vocab", self.d_vocab, 3, why="padding, the marker and another token")
        self._check_range("length", 2, why="the marker and the token that mirrors it")
        check_integer("n_ctx", self.n_ctx, self.max_length, why="max_length, the longest text")

    @property
    def n_out(self) -> int:
        return self.d_vocab - 2

    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        length = uniform(self.min_length, self.max_length, (n,), generator)
        tokens = uniform(2, self.d_vocab - 1, (n, self.n_ctx), generator)
        # One place of the first half, whole numbers below n // 2, and then in half of the texts its mirror.
        place = (torch.rand(n, generator=generator) * (length // 2)).long()
        mirrored = length - 1 - place
        swapped = uniform(0, 1, (n,), generator) == 1
        place, mirrored = torch.where(swapped, mirrored, place), torch.where(swapped, place, mirrored)
        label = tokens.gather(1, mirrored[:, None])[:, 0] - 2
        tokens.scatter_(1, place[:, None], 1)
        return self._padded(tokens, length), label
