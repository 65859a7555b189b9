"""A task: a source of labelled samples, and its splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.utils.validation import check_integer

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
        """Draw samples without a loop over samples or tokens."""

    def _check_range(self, name: str, least: int, why: str = "") -> None:
        low = check_integer(f"min_{name}", getattr(self, f"min_{name}"), least, why=why)
        check_integer(f"max_{name}", getattr(self, f"max_{name}"), low, why=f"min_{name} is the least")

    def _padded(self, tokens: Int[Tensor, "sample pos"], length: Int[Tensor, " sample"]) -> Int[Tensor, "sample pos"]:
        places = torch.arange(tokens.shape[1])
        return tokens.masked_fill_(places >= length[:, None], self.pad_id)

    def batch(self, n: int, seed: int | torch.Generator = 0) -> Samples:
        """Draw independent samples, on the CPU.

        Args:
            n: number of samples.
            seed: from 0 to 2³² - 1, or a generator, which advances.

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
            seed = torch.Generator().manual_seed(check_integer("seed", seed, 0, LARGEST_SEED))
        return self._draw(n, seed)

    def split(self, n_train: int, n_test: int, seed: int = 0) -> Split:
        """Draw fixed samples without duplicates, on the CPU.

        In tiny tasks, where samples repeat, labels with few different samples become rarer.

        Args:
            n_train, n_test: number of training and test samples.
            seed: from 0 to 2³² - 1.

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
        return Split(tokens[:n_train], labels[:n_train], tokens[n_train:n], labels[n_train:n])


def _without_duplicates(tokens: Tensor, labels: Tensor) -> Samples:
    new = torch.from_numpy(~pd.DataFrame(tokens.numpy()).duplicated().to_numpy())
    return tokens[new], labels[new]


def uniform(least: int, most: int, shape: tuple[int, ...], generator: torch.Generator) -> Int[Tensor, "*shape"]:
    """Draw integers uniformly, both bounds included."""
    return torch.randint(least, most + 1, shape, generator=generator)


def distinct(least: int, most: int, shape: tuple[int, int], generator: torch.Generator) -> Int[Tensor, "n length"]:
    """Draw integers as ``uniform``, but distinct within each row; in parts, because each row sorts all integers."""
    parts = torch.arange(shape[0]).split(4096)
    keys = (torch.rand(len(part), most - least + 1, generator=generator) for part in parts)
    return torch.cat([least + key.argsort(-1)[:, : shape[1]] for key in keys])


_DRAWS_PER_TEXT = 64  # samples drawn for each text that is kept


def long_texts(task: Task, texts: int, seed: int = 0) -> Int[Tensor, "text pos"]:
    """Texts of a task without padding: the longest of many, cut to the shortest of them."""
    check_integer("texts", texts, 1)
    tokens, _ = task.batch(texts * _DRAWS_PER_TEXT, torch.Generator().manual_seed(seed))
    lengths = (tokens != task.pad_id).sum(-1)
    longest = lengths.argsort(descending=True, stable=True)[:texts]
    return tokens[longest, : int(lengths[longest].min())]
