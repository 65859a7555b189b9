"""Two look-up tasks: by position alone, and by content alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tl_posdisent.utils.validation import check_fields, check_integer

from .sampling import Samples, Task, uniform


@dataclass(frozen=True)
class IndexLookup(Task):
    """Task: the token at a queried position. Purely positional.

    A text of ``min_length`` to ``max_length`` symbols, then the question, a token that names a position. The label is
    the symbol there. Symbols, length and position are uniform and independent, so labels are uniform.

    Question ids are 1 … ``n_places`` (for positions 0 … ``n_places - 1``), symbols the ``n_symbols`` ids above.

    Attributes:
        n_symbols: different symbols, and labels.
        n_places: positions that are asked for, at most ``min_length``.
        min_length, max_length: symbols of a text; the padded length ``n_ctx`` has one more, for the question.
        count_from: positions count from the first symbol (``"start"``: absolute positions answer) or back from the last
            (``"end"``: distances from the question answer).

    Raises:
        ValueError: sizes that do not fit each other; another ``count_from``.

    Example:
        >>> from tl_posdisent.synthetic import IndexLookup
        >>> task = IndexLookup(n_symbols=5, n_places=3, min_length=4, max_length=6)
        >>> tokens, labels = task.batch(2, seed=0)
        >>> for text, label in zip(tokens.tolist(), labels.tolist()):
        ...     print(text, label)
        [7, 8, 6, 7, 6, 7, 3] 2
        [5, 5, 8, 7, 1, 0, 0] 1
    """

    n_symbols: int = 32
    n_places: int = 24
    min_length: int = 24
    max_length: int = 32
    count_from: Literal["start", "end"] = "start"

    def __post_init__(self) -> None:
        check_fields(self, least={"n_symbols": 2})
        self._check_range("length", self.n_places, why="a symbol at each of the n_places")

    @property
    def d_vocab(self) -> int:  # type: ignore[override]
        """Padding, questions, symbols."""
        return 1 + self.n_places + self.n_symbols

    @property
    def n_ctx(self) -> int:  # type: ignore[override]
        return self.max_length + 1

    @property
    def n_out(self) -> int:
        return self.n_symbols

    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        length = uniform(self.min_length, self.max_length, (n, 1), generator)
        asked = uniform(0, self.n_places - 1, (n, 1), generator)
        first = 1 + self.n_places
        tokens = uniform(first, self.d_vocab - 1, (n, self.n_ctx), generator)
        there = asked if self.count_from == "start" else length - 1 - asked
        label = tokens.gather(1, there)[:, 0] - first
        tokens.scatter_(1, length, 1 + asked)
        return self._padded(tokens, length[:, 0] + 1), label


@dataclass(frozen=True)
class Retrieval(Task):
    """Task: the value that follows a queried key. Symbolic: only the order of neighbours matters.

    A text of ``n_pairs`` pairs, a key and then its value, among ``min_fill`` to ``max_fill`` fillers, then the
    question: one of the keys again. The label is its value. No key occurs in two pairs. All is drawn uniformly.

    Attributes:
        n_keys, n_values, n_fillers: numbers of ids, in this order after padding 0. Labels are values.
        n_pairs: pairs in a text, at most ``n_keys``.
        min_fill, max_fill: fillers in a text; the padded length ``n_ctx`` is ``2 * n_pairs + max_fill + 1``.

    Raises:
        ValueError: sizes that do not fit each other.

    Example:
        >>> from tl_posdisent.synthetic import Retrieval
        >>> task = Retrieval(n_keys=3, n_values=4, n_fillers=2, n_pairs=2, min_fill=1, max_fill=3)
        >>> tokens, labels = task.batch(2, seed=0)
        >>> for text, label in zip(tokens.tolist(), labels.tolist()):
        ...     print(text, label)
        [1, 5, 2, 7, 9, 9, 9, 2] 3
        [2, 5, 9, 1, 6, 2, 0, 0] 1
    """

    n_keys: int = 32
    n_values: int = 32
    n_fillers: int = 32
    n_pairs: int = 8
    min_fill: int = 8
    max_fill: int = 16

    def __post_init__(self) -> None:
        check_fields(self, least={"n_values": 2, "n_fillers": 0, "min_fill": 0, "max_fill": 0})
        check_integer("n_keys", self.n_keys, self.n_pairs, why="n_pairs have one key each")
        self._check_range("fill", 0)
        check_integer("n_fillers", self.n_fillers, min(1, self.max_fill))

    @property
    def d_vocab(self) -> int:  # type: ignore[override]
        """Padding, keys, values, fillers."""
        return 1 + self.n_keys + self.n_values + self.n_fillers

    @property
    def n_ctx(self) -> int:  # type: ignore[override]
        return 2 * self.n_pairs + self.max_fill + 1

    @property
    def n_out(self) -> int:
        return self.n_values

    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        device = generator.device
        fill = uniform(self.min_fill, self.max_fill, (n, 1), generator)
        keys = torch.rand(n, self.n_keys, generator=generator, device=device).argsort(-1)[:, : self.n_pairs]
        values = uniform(0, self.n_values - 1, (n, self.n_pairs), generator)
        # Pieces of a text: pairs, fillers, and at the end the fillers that this text does not have.
        piece = torch.arange(self.n_pairs + self.max_fill, device=device)
        keys_of_order = torch.rand(n, len(piece), generator=generator, device=device)
        order = keys_of_order.masked_fill_(piece >= self.n_pairs + fill, 2.0).argsort(-1)
        is_pair = order < self.n_pairs
        width = torch.where(is_pair, 2, 1)
        start = width.cumsum(-1) - width
        which = (is_pair.cumsum(-1) - 1).clamp_(min=0)  # the pairs are numbered as they come
        first = 1 + self.n_keys + self.n_values
        filler = uniform(first, max(first, self.d_vocab - 1), (n, self.n_ctx), generator)  # unused without fillers
        key, value = 1 + keys, 1 + self.n_keys + values
        tokens = filler.scatter(1, start, torch.where(is_pair, key.gather(1, which), filler.gather(1, start)))
        second = start + 1
        tokens.scatter_(1, second, torch.where(is_pair, value.gather(1, which), tokens.gather(1, second)))
        asked = uniform(0, self.n_pairs - 1, (n, 1), generator)
        length = 2 * self.n_pairs + fill
        tokens.scatter_(1, length, key.gather(1, asked))
        return self._padded(tokens, length[:, 0] + 1), values.gather(1, asked)[:, 0]
