"""Samples and splits of the two tasks of arXiv 2505.13027: the distance between two triggers, and their number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_fields, check_integer

Samples = tuple[Int[Tensor, "sample pos"], Int[Tensor, " sample"]]
"""Tokens, padded at the end with ``pad_id``, and labels from 0 to ``n_out - 1``, or ``IGNORED``; both int64."""

IGNORED = -100
"""Label of samples that loss and accuracy ignore, as in PyTorch's ``cross_entropy``."""

LARGEST_SEED = 2**32 - 1  # torch's CPU generator uses only 32 bits


@dataclass(frozen=True)
class Split:
    """Fixed training and test samples without duplicates: tokens ``[sample, pos]`` and labels ``[sample]``, int64.

    Example:
        >>> from tl_posdisent.synthetic import TriggerDistance
        >>> TriggerDistance().split(7, 3)
        Split of 7 training and 3 test samples, 128 positions
    """

    train_tokens: Int[Tensor, "train pos"]
    train_labels: Int[Tensor, " train"]
    test_tokens: Int[Tensor, "test pos"]
    test_labels: Int[Tensor, " test"]

    def __repr__(self) -> str:
        n, pos = self.train_tokens.shape
        return f"Split of {n} training and {len(self.test_labels)} test samples, {pos} positions"


class Task(ABC):
    """A source of samples: a frozen dataclass of sizes.

    ``d_vocab`` counts all token ids; 0 is the padding at the end of each text. ``n_ctx`` is the padded length.

    Example:
        >>> from tl_posdisent.synthetic import Task, TriggerCount
        >>> task = TriggerCount()
        >>> tokens, labels = task.batch(100)
        >>> isinstance(task, Task), tokens.shape[1] == task.n_ctx, int(labels.max()) < task.n_out
        (True, True, True)
    """

    pad_id: ClassVar[int] = 0
    d_vocab: int
    n_ctx: int

    @property
    @abstractmethod
    def n_out(self) -> int:
        """Number of logits that a model needs: labels are integers from 0 to ``n_out - 1``."""

    @property
    def chance(self) -> float:
        """Accuracy of the best constant guess, for uniform labels."""
        return 1 / self.n_out

    @abstractmethod
    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        """Draw samples on the generator's device, without a loop over samples or tokens."""

    def _check_range(self, name: str, least: int, why: str = "") -> None:
        low = check_integer(f"min_{name}", getattr(self, f"min_{name}"), least, why=why)
        check_integer(f"max_{name}", getattr(self, f"max_{name}"), low, why=f"min_{name} is the least")

    def _padded(self, tokens: Int[Tensor, "sample pos"], length: Int[Tensor, " sample"]) -> Int[Tensor, "sample pos"]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return tokens.masked_fill_(places >= length[:, None], self.pad_id)

    def batch(self, n: int, seed: int | torch.Generator = 0, *, device: str | torch.device | None = None) -> Samples:
        """Draw independent samples on the device.

        Args:
            n: number of samples.
            seed: from 0 to 2³² - 1, or a generator, which advances; samples are reproducible on one kind of device.
            device: device of the samples; default the generator's, or the CPU.

        Returns:
            Tokens ``[n, n_ctx]`` and labels ``[n]``, int64.

        Example:
            >>> from tl_posdisent.synthetic import TriggerCount
            >>> task = TriggerCount(d_vocab=6, n_triggers=1, max_count=2, min_length=3, max_length=4, n_ctx=5)
            >>> tokens, labels = task.batch(1000, seed=0)
            >>> bool(((tokens == 1).sum(1) == labels).all())  # token 1 is the trigger here
            True
        """
        check_integer("n", n, 1)
        if not isinstance(seed, torch.Generator):
            check_integer("seed", seed, 0, LARGEST_SEED)
            return self._draw(n, torch.Generator(device or "cpu").manual_seed(seed))
        if device is not None and torch.device(device).type != seed.device.type:
            raise ArgumentError("device", f"must be the generator's, {seed.device}, or None, got {device}")
        return self._draw(n, seed)

    def split(self, n_train: int, n_test: int, seed: int = 0, *, device: str | torch.device | None = None) -> Split:
        """Draw fixed samples without duplicates, the same on every device.

        In tiny tasks, where samples repeat, labels with few different samples become rarer.

        Args:
            n_train, n_test: number of training and test samples.
            seed: from 0 to 2³² - 1.
            device: device of the tensors; default the CPU.

        Raises:
            ValueError: invalid sizes or ``seed``; more samples than were found in the task.

        Example:
            >>> from tl_posdisent.synthetic import TriggerDistance
            >>> split = TriggerDistance().split(70, 30, seed=1)
            >>> split.train_tokens.shape, split.test_labels.shape
            (torch.Size([70, 128]), torch.Size([30]))
        """
        n = check_integer("n_train", n_train, 1) + check_integer("n_test", n_test, 1)
        generator = torch.Generator().manual_seed(check_integer("seed", seed, 0, LARGEST_SEED))
        tokens, labels = _without_duplicates(*self._draw(n, generator))
        while (before := len(tokens)) < n:
            more, more_labels = self._draw(n, generator)
            tokens, labels = _without_duplicates(torch.cat([tokens, more]), torch.cat([labels, more_labels]))
            if len(tokens) - before < n / 100:  # new samples become ever rarer, and the loop would not end
                raise ValueError(
                    f"n_train + n_test must be at most the number of different samples of the task, got {n_train} + "
                    f"{n_test}, but only {len(tokens)} were found, {len(tokens) - before} of them in the last {n}"
                )
        tokens, labels = tokens[:n].to(device), labels[:n].to(device)
        return Split(tokens[:n_train], labels[:n_train], tokens[n_train:], labels[n_train:])


def _without_duplicates(tokens: Tensor, labels: Tensor) -> Samples:
    new = torch.from_numpy(~pd.DataFrame(tokens.numpy()).duplicated().to_numpy())
    return tokens[new], labels[new]


def uniform(least: int, most: int, shape: tuple[int, ...], generator: torch.Generator) -> Int[Tensor, "*shape"]:
    """Draw integers uniformly, both bounds included."""
    return torch.randint(least, most + 1, shape, generator=generator, device=generator.device)


def distinct(least: int, most: int, shape: tuple[int, int], generator: torch.Generator) -> Int[Tensor, "n length"]:
    """Draw integers as ``uniform``, but distinct within each row; in parts, because each row sorts all integers."""
    rows, device = torch.arange(shape[0], device="cpu").split(4096), generator.device
    keys = (torch.rand(len(some), most - least + 1, generator=generator, device=device) for some in rows)
    return torch.cat([least + key.argsort(-1)[:, : shape[1]] for key in keys])


_DRAWN = 64  # samples drawn for each text that is kept


def long_texts(task: Task, texts: int, seed: int = 0) -> Int[Tensor, "text pos"]:
    """Texts of a task without padding: the longest of many, cut to the shortest of them."""
    check_integer("texts", texts, 1)
    tokens, _ = task.batch(texts * _DRAWN, torch.Generator().manual_seed(seed))
    lengths = (tokens != task.pad_id).sum(-1)
    longest = lengths.argsort(descending=True, stable=True)[:texts]
    return tokens[longest, : int(lengths[longest].min())]


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
        sides = torch.arange(self.min_side, self.max_side + 1, device="cpu")
        gap, *around = torch.cartesian_prod(torch.arange(self.gaps, device="cpu"), sides, sides).T
        length = gap + sum(around)  # plus the triggers, which all texts have
        if self.max_length is not None:
            length = length.clamp(max=self.max_length - self.min_gap - 2)
        counts = torch.bincount(length * self.gaps + gap, minlength=(int(length.max()) + 1) * self.gaps)
        return float(counts.view(-1, self.gaps).amax(1).sum() / counts.sum())

    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        gap = uniform(self.min_gap, self.max_gap, (n,), generator)
        before, after = (uniform(self.min_side, self.max_side, (n,), generator) for _ in range(2))
        fillers, second = (self._first_filler, self.d_vocab - 1), before + gap + 1
        place = torch.arange(max(self.n_ctx, self._longest), device=generator.device)
        if self.repeats:
            tokens = uniform(*fillers, (n, len(place)), generator)
        else:
            # Each segment takes the first fillers from a row of its own table of distinct fillers.
            segments = ((torch.zeros_like(gap), self.max_side), (before + 1, self.max_gap), (second + 1, self.max_side))
            tokens = torch.zeros(n, len(place), dtype=torch.int64, device=place.device)
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
        place = torch.arange(self.n_ctx, device=tokens.device)
        keys = torch.rand(n, self.n_ctx, generator=generator, device=tokens.device)
        order = keys.masked_fill_(place >= length[:, None], 2.0).argsort(-1)  # positions in random order
        chosen = torch.zeros(n, self.n_ctx, dtype=torch.bool, device=place.device)
        chosen.scatter_(1, order, place < count[:, None])
        label = count - self.min_count
        if self._ignores:
            label = label.masked_fill(count == 0, IGNORED)
        return self._padded(torch.where(chosen, triggers, tokens), length), label
