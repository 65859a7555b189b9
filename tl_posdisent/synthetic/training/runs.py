"""Settings and results of a training run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch

from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.sampling import LARGEST_SEED, Split, Task
from tl_posdisent.utils.pictures import HasTable, figure_function
from tl_posdisent.utils.validation import check_fields, check_integer, check_number, shown

from .checkpoints import load_checkpoint

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run: optimiser, schedule, samples, seeds.

    The learning rate of AdamW rises linearly from 0 to ``lr`` over the first ``warmup`` of all steps and falls to 0
    along half a cosine. An epoch uses the training samples in a new order. The defaults are those of arXiv 2505.13027
    except clipping and the last batch; ``preset("paper")`` has all of its settings.

    Attributes:
        epochs: times that every sample is seen.
        batch_size: samples per step.
        lr: peak learning rate.
        betas: AdamW's, each from 0 to 1 (not included).
        weight_decay: AdamW's, 0 or more.
        warmup: share of the steps, from 0 to 1.
        clip: greatest norm of the gradient, above 0; None for no clipping.
        keep_last: an epoch ends with a smaller batch if ``batch_size`` does not divide ``n_train``; by default these
            samples are left out.
        n_train: samples to train on.
        n_test: samples to test with; no sample is in both.
        seed: of the order of samples and of dropout; the initial weights are the model's.
        split_seed: which samples.
        log_every: steps per row of metrics.
        test_every: steps between measurements on the test samples; None for the end alone.
        checkpoints: after these steps the weights are kept; 0 is before the first.
        precision: ``"bfloat16"`` is autocast with weights in float32 (and fused attention, on a CPU), faster also for
            wide models on a CPU with AVX512-BF16 or AMX. ``"auto"``: ``"bfloat16"`` on a GPU, ``"float32"`` on a CPU.
        pieces: split a batch, sorted by length, into so many pieces, each as long as its longest text, so that less
            padding is computed; gradients are equal up to rounding. None: 4 on a CPU, 1 on a GPU.

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
    checkpoints: tuple[int, ...] = ()
    precision: Precision = "auto"
    pieces: int | None = None

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.epochs * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return -(-self.n_train // self.batch_size) if self.keep_last else self.n_train // self.batch_size

    def samples(self, steps: int) -> int:
        """Samples seen in the first steps."""
        epochs, within = divmod(steps, self.steps_per_epoch)
        of_epoch = self.n_train if self.keep_last else self.steps_per_epoch * self.batch_size
        return epochs * of_epoch + within * self.batch_size

    def learning_rate(self, step: int) -> float:
        """During step 0, 1, … ``steps - 1``."""
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
        for name, n in (("betas", 2), ("checkpoints", None)):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or isinstance(values, str) or n not in (None, len(values)):
                raise ValueError(f"{name} must be a sequence of {n or ''} numbers, got {shown(values)}")
        for beta in self.betas:
            check_number("betas", beta, least=0, below=1)
        for step in self.checkpoints:
            check_integer("checkpoints", step, 0, self.steps, why="the steps of this training")
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "checkpoints", tuple(sorted(set(self.checkpoints))))


@dataclass(frozen=True, eq=False, repr=False)
class TrainRun(HasTable):
    """A training run, finished or stopped.

    Attributes:
        model: as it is after the last step, in evaluation mode.
        task: what it was trained on.
        config: how.
        metrics: one row per ``log_every`` steps and wherever the test samples were measured: ``step`` and ``samples``
            so far, ``lr``; means over the steps since the previous row of ``loss`` (nats), ``accuracy`` (both with
            dropout) and ``grad_norm`` (before clipping); ``test_loss`` and ``test_accuracy``, NaN where not measured;
            ``seconds`` of training.
        checkpoints: step → file with the weights.

    Example:
        >>> from tl_posdisent.synthetic import TrainConfig, preset, train
        >>> small, how = preset("small"), TrainConfig(epochs=1, batch_size=32, n_train=320, n_test=100)
        >>> run = train(small.model("rope", "count"), small.tasks["count"], how, progress=False)
        >>> run.metrics["step"].tolist()
        [10]
    """

    model: SyntheticModel
    task: Task
    config: TrainConfig
    metrics: pd.DataFrame
    checkpoints: dict[int, Path] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps done."""
        return int(self.metrics["step"].iloc[-1]) if len(self.metrics) else 0

    @property
    def test_accuracy(self) -> float:
        """When last measured; NaN if never."""
        return self._last("test_accuracy")

    @property
    def test_loss(self) -> float:
        """In nats, when last measured; NaN if never."""
        return self._last("test_loss")

    def _last(self, column: str) -> float:
        measured = self.metrics[column].dropna()
        return float(measured.iloc[-1]) if len(measured) else math.nan

    def split(self, device: str | torch.device | None = None) -> Split:
        """The samples that it was trained on and tested with."""
        return self.task.split(self.config.n_train, self.config.n_test, self.config.split_seed, device=device)

    def at(self, step: int) -> SyntheticModel:
        """The model as it was after a step, from its checkpoint; a new model each time, on the CPU.

        Raises:
            ValueError: no checkpoint of that step; a file that is damaged.
        """
        if step not in self.checkpoints:
            raise ValueError(f"step must be one of the checkpoints {sorted(self.checkpoints)}, got {step!r}")
        return load_checkpoint(self.checkpoints[step])

    def to_frame(self) -> pd.DataFrame:
        """A copy of the metrics."""
        return self.metrics.copy()

    def plot(self, **options: Any) -> Any:
        """Plot training and test loss and accuracy: ``plot_training``, with its options."""
        return figure_function("plot_training")(self, **options)

    def __repr__(self) -> str:
        last = self.metrics.iloc[-1] if len(self.metrics) else {"loss": math.nan, "accuracy": math.nan, "seconds": 0.0}
        encoding = self.model.config.encoding
        kept = f", {len(self.checkpoints)} checkpoints" if self.checkpoints else ""
        return (
            f"TrainRun of {encoding} on {self.task}: {self.steps} of {self.config.steps} steps\n"
            f"  test accuracy {self.test_accuracy:.4f}; in training {last['accuracy']:.4f}, loss {last['loss']:.4g}; "
            f"{last['seconds']:.0f} s{kept}"
        )
