"""Train and evaluate synthetic models; training is seeded, and a resumed run ends with identical weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_posdisent.models.running.forward_pass import running, with_gradients
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.task import IGNORED, LARGEST_SEED, Split, Task
from tl_posdisent.synthetic.training.loop import Settings, TrainingLoop, load_checkpoint, save_checkpoint
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import no_autocast
from tl_posdisent.utils.restoring import without_gradients
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import (
    check_fields,
    check_float64,
    check_integer,
    check_number,
    check_values,
    described,
    shown,
)


@without_gradients()
def evaluate(
    model: SyntheticModel,
    tokens: Int[Tensor, "sample pos"],
    labels: Int[Tensor, " sample"],
    *,
    batch_size: int = 1024,
) -> tuple[float, float]:
    """Compute mean cross-entropy and accuracy on labelled samples, without dropout.

    Call it within ``model.hooks(fwd_hooks=…)`` to measure an intervention.

    Args:
        tokens: ``[sample, pos]``, from ``task.batch`` or a split; with padding at the end.
        labels: ``[sample]``; loss and accuracy ignore labels of -100.
        batch_size: number of samples at a time; samples of similar length are batched together.

    Returns:
        Loss in nats, and the share of labels with the largest logit.

    Raises:
        ValueError: another kind of model; no samples, or another number of labels; ids or labels out of range.

    Example:
        >>> from tl_posdisent.synthetic import evaluate, preset
        >>> small = preset("small")
        >>> loss, accuracy = evaluate(small.model("rope", "count"), *small.tasks["count"].batch(100))
        >>> loss > 1, accuracy < 0.5  # it is untrained
        (True, True)
    """
    check_integer("batch_size", batch_size, 1)
    check_samples(model, tokens, labels)
    pad = model.config.pad_id
    device = next(model.parameters()).device
    lengths = lengths_of(tokens, pad).cpu()
    loss = right = torch.zeros((), dtype=torch.float64, device=device)
    with running(model):
        for piece in lengths.argsort(stable=True).split(batch_size):
            there = piece.to(tokens.device)
            wanted = labels[piece.to(labels.device)].to(device)
            logits = answers(model, tokens[there, : padded_width(lengths[piece])].to(device), pad).float()
            loss = loss + cross_entropy(logits, wanted, reduction="sum")
            right = right + (logits.argmax(-1) == wanted).sum()
    counted = int((labels != IGNORED).sum())
    return loss.item() / counted, right.item() / counted


def check_samples(model: Any, tokens: Any, labels: Any) -> None:
    """Raise if samples are invalid for the model."""
    if not isinstance(model, SyntheticModel):
        raise ArgumentError("model", f"must be a SyntheticModel, got {type(model).__name__}")
    check_float64("model", model.embed.W_E.device)
    for name, x, ndim in (("tokens", tokens, 2), ("labels", labels, 1)):
        check_values(name, x)
        if not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool or x.ndim != ndim:
            raise ArgumentError(name, f"must be integers of shape {('sample', 'pos')[:ndim]}, got {described(x)}")
    if len(labels) != len(tokens):
        raise ArgumentError("labels", f"must be one per row of tokens, got {len(labels)} for {len(tokens)} rows")
    model.check_tokens(tokens)
    counted = labels[labels != IGNORED]
    if not len(counted):
        raise ArgumentError("labels", f"must have at least one other than {IGNORED}, got {len(labels)} of {IGNORED}")
    least, most = (int(value) for value in counted.aminmax())
    if least < 0 or most >= model.config.n_out:
        raise ArgumentError(
            "labels", f"must be from 0 to {model.config.n_out - 1} for this model, got {least} … {most}"
        )


def answers(model: Any, tokens: Int[Tensor, "sample pos"], pad: int | None) -> Tensor:
    """Compute one row of logits per sample: with a read-out at every token, that of the last token."""
    logits: Tensor = model(tokens, checked=True)
    if logits.ndim == 2:
        return logits
    return logits[torch.arange(len(tokens), device=tokens.device), lengths_of(tokens, pad) - 1]


def lengths_of(tokens: Int[Tensor, "sample pos"], pad: int | None) -> Int[Tensor, " sample"]:
    """Return the length of each text up to its last token that is not padding."""
    place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    real = torch.ones_like(tokens) if pad is None else (tokens != pad)
    return (real * place).amax(-1).clamp(min=1)


def padded_width(lengths: Int[Tensor, " sample"]) -> int:
    """Round the largest length up to a multiple of 8, for which kernels are faster."""
    return -(-int(lengths.max()) // 8) * 8


_COLUMNS = ["step", "samples", "lr", "loss", "accuracy", "grad_norm", "test_loss", "test_accuracy", "seconds"]

Precision = Literal["auto", "float32", "bfloat16"]


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
        checkpoints: steps after which the weights are saved; 0 is before the first.
        precision: ``"bfloat16"`` is autocast with weights in float32. ``"auto"``: bfloat16 on a GPU, float32 on a CPU.
        pieces: number of pieces into which a batch, sorted by length, is split. Each is as long as its longest text, so
            that less padding is computed; gradients are equal up to rounding. None: 4 on a CPU, 1 on a GPU.

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
        for name in ("betas", "checkpoints"):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or isinstance(values, str) or (name == "betas" and len(values) != 2):
                raise ArgumentError(
                    name, f"must be a sequence of {'2 ' * (name == 'betas')}numbers, got {shown(values)}"
                )
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
        model: the model after the last step, in evaluation mode.
        task: the task.
        config: the settings.
        metrics: one row per ``log_every`` steps and per measurement on the test samples: ``step`` and ``samples`` so
            far, ``lr``; means since the previous row of ``loss`` (nats), ``accuracy`` (both with dropout) and
            ``grad_norm`` (before clipping); ``test_loss`` and ``test_accuracy``, NaN where not measured; ``seconds`` of
            training.
        checkpoints: step → file with the weights.
    """

    model: SyntheticModel
    task: Task
    config: TrainConfig
    metrics: pd.DataFrame
    checkpoints: dict[int, Path] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return int(self.metrics["step"].iloc[-1]) if len(self.metrics) else 0

    @property
    def test_accuracy(self) -> float:
        """Last measured test accuracy; NaN if it was not measured."""
        return _last(self.metrics["test_accuracy"])

    @property
    def test_loss(self) -> float:
        """Last measured test loss in nats; NaN if it was not measured."""
        return _last(self.metrics["test_loss"])

    def split(self, device: str | torch.device | None = None) -> Split:
        """Draw the training and test samples of this run."""
        return self.task.split(self.config.n_train, self.config.n_test, self.config.split_seed, device=device)

    def at(self, step: int) -> SyntheticModel:
        """Load the model after a step from its checkpoint; a new model each time, on the CPU.

        Raises:
            ValueError: no checkpoint of that step; a damaged file.
        """
        if step not in self.checkpoints:
            raise ArgumentError("step", f"must be one of the checkpoints {sorted(self.checkpoints)}, got {step!r}")
        return load_checkpoint(self.checkpoints[step])

    def to_frame(self) -> pd.DataFrame:
        """Return a copy of the metrics."""
        return self.metrics.copy()

    def __repr__(self) -> str:
        kept = f", {len(self.checkpoints)} checkpoints" if self.checkpoints else ""
        accuracy, loss, seconds = (_last(self.metrics[name]) for name in ("accuracy", "loss", "seconds"))
        return (
            f"TrainRun of {self.model.config.encoding} on {self.task}: {self.steps} of {self.config.steps} steps\n"
            f"  test accuracy {self.test_accuracy:.4f}; in training {accuracy:.4f}, loss {loss:.4g}; "
            f"{seconds:.0f} s{kept}"
        )


def _last(column: pd.Series) -> float:
    measured = column.dropna()
    return float(measured.iloc[-1]) if len(measured) else math.nan


def train(
    model: SyntheticModel,
    task: Task,
    config: TrainConfig | None = None,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    stop_at: int | None = None,
    on_step: Callable[[int, SyntheticModel], None] | None = None,
    progress: bool = True,
) -> TrainRun:
    """Train a synthetic model on a task, in place.

    Random numbers depend only on ``config.seed`` and the number of the step, so a resumed training run ends with
    exactly the weights of an uninterrupted one (on a CPU with the same number of threads). After an error or Ctrl-C the
    model keeps its mode and the weights of the last step.

    Args:
        model: the model to train, from its current weights; on CPU or GPU.
        task: source of samples, which the model's ``d_vocab``, ``n_ctx``, ``n_out`` and ``pad_id`` must fit.
        config: settings; default ``TrainConfig()``.
        folder: save ``step-000123.safetensors`` there for each of ``config.checkpoints`` and the end, and
            ``state.safetensors``, from which ``resume`` continues, at these steps and once a minute.
        resume: continue from the state in ``folder``, if there is one.
        stop_at: stop after this step, to resume later.
        on_step: function that is called after every step, with the number of steps done and the model.

    Returns:
        A ``TrainRun``: model (in evaluation mode), metrics, checkpoints.

    Raises:
        ValueError: a model that does not fit the task; a loss that is not finite; ``resume`` without a folder, or with
            a state of other settings or a damaged state in it; a folder with a state, without ``resume``, or one in
            which another process trains.

    Example:
        >>> from tl_posdisent.synthetic import TrainConfig, preset, train
        >>> small, how = preset("small"), TrainConfig(epochs=1, batch_size=64, n_train=3200, n_test=500, lr=1e-2)
        >>> train(small.model("rope", "count"), small.tasks["count"], how, progress=False).test_accuracy > 0.1
        True
    """
    config = config or TrainConfig()
    for name, value, kind in (("model", model, SyntheticModel), ("task", task, Task), ("config", config, TrainConfig)):
        if not isinstance(value, kind):
            raise ArgumentError(name, f"must be a {kind.__name__}, got {type(value).__name__}")
    check_float64("model", model.embed.W_E.device)
    for name in ("d_vocab", "n_out", "n_ctx"):
        has, needs = getattr(model.config, name), getattr(task, name)
        if has < needs:
            raise ArgumentError("model", f"must have {name} of at least {needs} for this task, got {has}")
    if model.config.pad_id not in (None, task.pad_id):
        raise ArgumentError(
            "model",
            f"must have pad_id={task.pad_id}, the task's, or None to read padding as a token, got "
            f"{model.config.pad_id}",
        )
    if stop_at is not None:
        check_integer("stop_at", stop_at, 1)
    with with_gradients(model), no_autocast():  # config.precision determines the dtype
        training = TaskTraining(model, task, config, folder)
        training.run(resume=resume, stop_at=stop_at, on_step=on_step, progress=progress)
    rows = [{**row, "samples": config.samples(row["step"])} for row in training.rows]
    return TrainRun(model, task, config, pd.DataFrame(rows, columns=_COLUMNS), training.checkpoints)


class TaskTraining(TrainingLoop):
    """Training on a task. Orders and dropout depend only on the seed and the number of the epoch or step."""

    model: SyntheticModel

    def __init__(
        self, model: SyntheticModel, task: Task, config: TrainConfig, folder: str | Path | None = None
    ) -> None:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        super().__init__(
            model, optimizer, steps=config.steps, clip=config.clip, log_every=config.log_every, folder=folder
        )
        self.task, self.config, self.pad = task, config, model.config.pad_id
        on_gpu = self.device.type != "cpu"
        self.split = task.split(config.n_train, config.n_test, config.split_seed, device=self.device)
        self.lengths = lengths_of(self.split.train_tokens, self.pad).cpu()
        self.pieces = config.pieces or (1 if on_gpu else 4)
        self.half = config.precision == "bfloat16" or (config.precision == "auto" and on_gpu)
        self.epoch, self.order = -1, torch.empty(0, dtype=torch.int64, device="cpu")

    def gradients(self) -> dict[str, Tensor]:
        """Add the gradients of the mean loss over the step's samples, without ignored ones."""
        torch.manual_seed(_seed_of(self.config.seed, "dropout", self.done))
        chosen = self.samples()
        loss = right = torch.zeros((), dtype=torch.float32, device=self.device)
        counted = (self.split.train_labels[chosen.to(self.device)] != IGNORED).sum().clamp_min(1)
        for piece in chosen.tensor_split(min(self.pieces, len(chosen))):
            there = piece.to(self.device, non_blocking=True)
            tokens = self.split.train_tokens[there, : padded_width(self.lengths[piece])]
            labels = self.split.train_labels[there]
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                logits = answers(self.model, tokens, self.pad)
            part = cross_entropy(logits.float(), labels, reduction="sum") / counted
            part.backward()
            loss = loss + part.detach()
            right = right + (logits.argmax(-1) == labels).sum()
        return {"loss": loss, "accuracy": right / counted}

    def samples(self) -> Int[Tensor, " sample"]:
        """Return the indices of the step's samples, on the CPU, the shortest first."""
        size = self.config.batch_size
        epoch, within = divmod(self.done, self.config.steps_per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(_seed_of(self.config.seed, "order", epoch))
            self.epoch, self.order = epoch, torch.randperm(self.config.n_train, generator=generator, device="cpu")
        chosen = self.order[within * size : (within + 1) * size]
        return chosen[self.lengths[chosen].argsort(stable=True)]

    def learning_rate(self, step: int) -> float:
        return self.config.learning_rate(step)

    def settings(self, done: int) -> Settings:
        parts: dict[str, Any] = {"model": self.model.config, "task": self.task, "training": self.config}
        plain = {part: dataclasses.asdict(of) for part, of in parts.items()}
        plain["task"]["name"] = type(self.task).__name__
        return json.loads(json.dumps(plain))  # type: ignore[no-any-return]

    def save_weights(self, path: Path) -> None:
        save_checkpoint(self.model, path, {**self.settings(self.done), "step": self.done})

    def measure(self, done: int) -> dict[str, float]:
        """Measure the test samples at checkpoints, every ``test_every`` steps and at the end."""
        if not (
            self.keeps(done) or done == self.steps or (self.config.test_every and done % self.config.test_every == 0)
        ):
            return {}
        loss, accuracy = evaluate(self.model, self.split.test_tokens, self.split.test_labels)
        return {"test_loss": loss, "test_accuracy": accuracy}

    def keeps(self, done: int) -> bool:
        return done in self.config.checkpoints


def _seed_of(seed: int, what: str, number: int) -> int:
    """Derive an independent seed for each order and each step."""
    entropy = (seed, *what.encode(), number)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
