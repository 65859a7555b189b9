"""The base class of synthetic tasks: labelled samples, and splits without duplicates."""

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
"""Tokens, padded behind with ``pad_id``, and their labels from 0 to ``n_out - 1``, or ``IGNORED``; both int64."""

IGNORED = -100
"""The label of samples outside loss and accuracy, as in PyTorch's ``cross_entropy``."""

LARGEST_SEED = 2**32 - 1  # the CPU's generator uses no more bits

_ROWS = 4096


@dataclass(frozen=True)
class Split:
    """Fixed training and test samples without duplicates: tokens ``[sample, pos]`` and labels ``[sample]``, int64.

    Example:
        >>> from tl_posdisent.synthetic import TriggerDistance
        >>> TriggerDistance().split(7, 3)
        Split of 7 samples to train on and 3 to test with, 128 positions
    """

    train_tokens: Int[Tensor, "train pos"]
    train_labels: Int[Tensor, " train"]
    test_tokens: Int[Tensor, "test pos"]
    test_labels: Int[Tensor, " test"]

    def __repr__(self) -> str:
        n, pos = self.train_tokens.shape
        return f"Split of {n} samples to train on and {len(self.test_labels)} to test with, {pos} positions"


class Task(ABC):
    """A source of samples. The tasks are frozen dataclasses; their fields are the sizes.

    Token 0 is the padding, behind each text; each task defines the other ids. ``d_vocab`` counts all of them, and
    ``n_ctx`` is the padded length.

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
        """How many logits a model needs: labels are numbers from 0 to ``n_out - 1``."""

    @property
    def chance(self) -> float:
        """Accuracy of the best constant guess: labels are uniform in all tasks here."""
        return 1 / self.n_out

    @abstractmethod
    def _draw(self, n: int, generator: torch.Generator) -> Samples:
        """Samples on the generator's device, without a loop over samples or tokens."""

    def _check_range(self, name: str, least: int, why: str = "") -> None:
        low = check_integer(f"min_{name}", getattr(self, f"min_{name}"), least, why=why)
        check_integer(f"max_{name}", getattr(self, f"max_{name}"), low, why=f"min_{name} is the least")

    def _padded(self, tokens: Int[Tensor, "sample pos"], length: Int[Tensor, " sample"]) -> Int[Tensor, "sample pos"]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return tokens.masked_fill_(places >= length[:, None], self.pad_id)

    def batch(self, n: int, seed: int | torch.Generator = 0, *, device: str | torch.device | None = None) -> Samples:
        """Draw independent samples, on the device.

        Args:
            n: how many, at least 1.
            seed: a number from 0 to 2³² - 1, the same samples for the same number, device and version of torch; or a
                generator, which advances.
            device: default the generator's, or the CPU.

        Returns:
            Tokens ``[n, n_ctx]`` and labels ``[n]``, int64.

        Raises:
            ValueError: invalid ``n`` or ``seed``; a generator of another device.

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
            raise ValueError(f"device must be the generator's, {seed.device}, or None, got {device}")
        return self._draw(n, seed)

    def split(self, n_train: int, n_test: int, seed: int = 0, *, device: str | torch.device | None = None) -> Split:
        """Draw fixed samples, the same on every device; a sample that was drawn before is left out.

        Samples of tasks of the usual sizes hardly ever repeat. Where they do, in tiny tasks, labels with few samples
        become rarer.

        Args:
            n_train: samples to train on, at least 1.
            n_test: samples to test with, at least 1.
            seed: from 0 to 2³² - 1.
            device: where the tensors go; default the CPU, where they are made.

        Raises:
            ValueError: invalid sizes or ``seed``; more samples than the task was found to have.

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
            if len(tokens) - before < n / 100:  # ever fewer new ones: this would not end
                raise ValueError(
                    f"n_train + n_test must be no more than the task has samples, got {n_train} + {n_test}: "
                    f"among {n} more there were {len(tokens) - before} new ones, which makes {len(tokens)}"
                )
        tokens, labels = tokens[:n].to(device), labels[:n].to(device)
        return Split(tokens[:n_train], labels[:n_train], tokens[n_train:], labels[n_train:])


def _without_duplicates(tokens: Tensor, labels: Tensor) -> Samples:
    new = torch.from_numpy(~pd.DataFrame(tokens.numpy()).duplicated().to_numpy())
    return tokens[new], labels[new]


def uniform(least: int, most: int, shape: tuple[int, ...], generator: torch.Generator) -> Int[Tensor, "*shape"]:
    """Integers, both bounds included, each with the same probability."""
    return torch.randint(least, most + 1, shape, generator=generator, device=generator.device)


def distinct(least: int, most: int, shape: tuple[int, int], generator: torch.Generator) -> Int[Tensor, "n length"]:
    """Integers as of ``uniform``, none twice in a row; some thousand rows at a time, as each row sorts all of them."""
    n, length = shape
    rows = []
    for start in range(0, n, _ROWS):
        keys = torch.rand(min(_ROWS, n - start), most - least + 1, generator=generator, device=generator.device)
        rows.append(least + keys.argsort(-1)[:, :length])
    return torch.cat(rows)
