"""The base class of synthetic tasks: labelled samples, and splits without duplicates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.utils.validation import is_integer

Samples = tuple[Int[Tensor, "sample pos"], Int[Tensor, " sample"]]
"""Tokens, padded behind with ``pad_id``, and their labels from 0 to ``n_out - 1``, or ``IGNORED``; both int64."""

_ROWS = 4096

IGNORED = -100
"""The label of samples outside loss and accuracy, as in PyTorch's ``cross_entropy``."""


@dataclass(frozen=True)
class Split:
    """Fixed training and test samples without duplicates.

    Attributes:
        train_tokens: ``[sample, pos]`` int64, padded behind with the task's ``pad_id``.
        train_labels: ``[sample]`` int64.
        test_tokens: ``[sample, pos]`` int64.
        test_labels: ``[sample]`` int64.

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

    Token 0 is the padding, behind each text; what the other ids are, each task says. ``d_vocab`` counts all of them,
    ``n_out`` the labels, and ``n_ctx`` is the padded length.

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
        """Samples on the generator's device. A loop over samples or tokens has no place here."""

    def batch(self, n: int, seed: int | torch.Generator = 0, *, device: str | torch.device | None = None) -> Samples:
        """Independent samples, made on the device.

        Args:
            n: how many, at least 1.
            seed: a number from 0 to 2³² - 1, the same samples for the same number, device and version of torch; or a
                generator, which moves on.
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
        whole("n", n, least=1)
        return self._draw(n, _generator(seed, device))

    def split(self, n_train: int, n_test: int, seed: int = 0, *, device: str | torch.device | None = None) -> Split:
        """Fixed samples, the same on every device; a sample that was drawn before is left out.

        Samples of tasks of the usual sizes hardly ever repeat. Where they do, in tiny tasks, leaving them out thins
        those labels that have few samples.

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
        whole("n_train", n_train, least=1)
        whole("n_test", n_test, least=1)
        n, generator = n_train + n_test, _generator(seed, "cpu")
        tokens, labels = self._draw(n, generator)
        new = _first_times(tokens)
        while new.sum() < n:
            before = int(new.sum())
            more, more_labels = self._draw(n, generator)
            tokens, labels = torch.cat([tokens[new], more]), torch.cat([labels[new], more_labels])
            new = _first_times(tokens)
            if new.sum() - before < n / 100:  # ever fewer new ones: this would not end
                raise ValueError(
                    f"n_train + n_test must be no more than the task has samples, got {n_train} + {n_test}: "
                    f"among {n} more there were {int(new.sum()) - before} new ones, which makes {int(new.sum())}"
                )
        tokens, labels = tokens[new][:n].to(device), labels[new][:n].to(device)
        return Split(tokens[:n_train], labels[:n_train], tokens[n_train:], labels[n_train:])


def _generator(seed: int | torch.Generator, device: str | torch.device | None) -> torch.Generator:
    if isinstance(seed, torch.Generator):
        if device is not None and torch.device(device).type != seed.device.type:
            raise ValueError(f"device must be the generator's, {seed.device}, or None, got {device}")
        return seed
    whole("seed", seed, least=0, most=2**32 - 1)  # of more, the CPU's generator would not see the rest
    return torch.Generator(device or "cpu").manual_seed(seed)


def _first_times(tokens: Int[Tensor, "sample pos"]) -> Tensor:
    """Which rows differ from all rows above them.

    By a hash of 64 bits: equal rows have equal ones, so none slips through. Two rows that differ share one with a
    chance of about 2⁻⁶⁴, and then one that could have stayed is left out.
    """
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, tokens.shape[1:], generator=generator)
    values, order = ((tokens + 1) * factors).sum(-1).sort(stable=True)  # wraps around, as it should
    first = torch.ones_like(values, dtype=torch.bool)
    first[1:] = values[1:] != values[:-1]
    return torch.empty_like(first).scatter_(0, order, first)


def whole(name: str, value: int, *, least: int, most: int | None = None, why: str = "") -> None:
    """Raise unless ``value`` is an integer within these bounds."""
    bounds = f"{least} or more" if most is None else f"from {least} to {most}"
    if not is_integer(value) or value < least or (most is not None and value > most):
        raise ValueError(f"{name} must be a whole number, {bounds}{why and f' ({why})'}, got {value!r}")


def uniform(least: int, most: int, n: int, generator: torch.Generator) -> Int[Tensor, " n"]:
    """Whole numbers, both ends included, each as likely."""
    return torch.randint(least, most + 1, (n,), generator=generator, device=generator.device)


def distinct(least: int, most: int, n: int, length: int, generator: torch.Generator) -> Int[Tensor, "n length"]:
    """Token ids as ``texts``, none twice in a row; a few thousand rows at a time, as each sorts all ids."""
    rows = []
    for start in range(0, n, _ROWS):
        lots = torch.rand(min(_ROWS, n - start), most - least + 1, generator=generator, device=generator.device)
        rows.append(least + lots.argsort(-1)[:, :length])
    return torch.cat(rows)


def texts(least: int, most: int, n: int, length: int, generator: torch.Generator) -> Int[Tensor, "n length"]:
    """Token ids, both ends included, each as likely."""
    return torch.randint(least, most + 1, (n, length), generator=generator, device=generator.device)
