"""Settings of a training run of a synthetic model: optimiser, schedule, samples, seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tl_posdisent.synthetic.tasks.task import LARGEST_SEED
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_fields, check_integer, check_number, shown


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run: optimiser, schedule, samples, seeds.

    AdamW's learning rate rises linearly to ``lr`` over the first ``warmup`` of all steps, and falls to 0 along half a
    cosine. Each epoch uses the training samples in a new order. The defaults are those of arXiv 2505.13027 except
    clipping and the last batch (``preset("paper")`` has all of its settings).

    Attributes:
        epochs: number of passes over the training samples.
        batch_size: samples per step.
        lr: peak learning rate.
        betas: betas of AdamW, each at least 0 and below 1.
        weight_decay: weight decay of AdamW, 0 or more.
        warmup: share of the steps, from 0 to 1.
        clip: largest norm of the gradient, above 0; None for no clipping.
        keep_last: whether an epoch ends with a smaller batch if ``batch_size`` does not divide ``n_train``; by default
            these samples are left out.
        n_train: number of training samples.
        n_test: number of test samples; no sample is in both sets.
        seed: seed of the order of samples and of dropout; the initial weights are the model's.
        split_seed: seed of the samples.
        log_every: number of steps per row of metrics.
        test_every: number of steps between measurements on the test samples; None measures only at the end.
        precision: ``"float32"``, or ``"bfloat16"`` for autocast with weights in float32, which is faster on a GPU.
        pieces: number of pieces into which a batch, sorted by length, is split. Each is as long as its longest text, so
            that less padding is computed; gradients are equal up to rounding. 1 is faster on a GPU.

    Raises:
        ValueError: a value out of range.

    Example:
        >>> from tl_posdisent.synthetic import TrainConfig
        >>> TrainConfig(epochs=2, batch_size=10, n_train=105).steps
        20
    """

    epochs: int = 100
    batch_size: int = 512
    lr: float = 1e-4
    betas: tuple[float, float] = (0.98, 0.9)
    weight_decay: float = 1e-5
    warmup: float = 0.06
    clip: float | None = 1.0
    keep_last: bool = False
    n_train: int = 70_000
    n_test: int = 30_000
    seed: int = 0
    split_seed: int = 0
    log_every: int = 50
    test_every: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    pieces: int = 4

    @property
    def steps(self) -> int:
        """Number of steps of the whole training run."""
        return self.epochs * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of an epoch."""
        return -(-self.n_train // self.batch_size) if self.keep_last else self.n_train // self.batch_size

    def samples(self, steps: int) -> int:
        """Return the number of samples used in the first ``steps`` steps."""
        epochs, within = divmod(steps, self.steps_per_epoch)
        of_epoch = self.n_train if self.keep_last else self.steps_per_epoch * self.batch_size
        return epochs * of_epoch + within * self.batch_size

    def learning_rate(self, step: int) -> float:
        """Compute the learning rate of step 0, 1, … ``steps - 1``."""
        warm = round(self.warmup * self.steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / (self.steps - warm)))

    def __post_init__(self) -> None:
        check_fields(self, least={"seed": 0, "split_seed": 0})
        check_integer("n_train", self.n_train, self.batch_size, why="one batch")
        for name in ("seed", "split_seed"):
            check_integer(name, getattr(self, name), 0, LARGEST_SEED)
        check_number("lr", self.lr, above=0)
        check_number("weight_decay", self.weight_decay, least=0)
        check_number("warmup", self.warmup, least=0, most=1)
        if self.clip is not None and self.clip != math.inf:
            check_number("clip", self.clip, above=0)
        if not isinstance(self.betas, Sequence) or isinstance(self.betas, str) or len(self.betas) != 2:
            raise ArgumentError("betas", f"must be a sequence of 2 numbers, got {shown(self.betas)}")
        for beta in self.betas:
            check_number("betas", beta, least=0, below=1)
        object.__setattr__(self, "betas", tuple(self.betas))
