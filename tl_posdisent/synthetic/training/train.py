"""Train a synthetic model: seeded, with a checkpoint at the end of each epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from tl_posdisent.models.running.forward_pass import with_gradients
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.task import IGNORED, Split, Task
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import no_autocast
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import check_float64

from .checkpoints import save_checkpoint
from .evaluation import answers, evaluate, lengths_of, padded_width
from .settings import TrainConfig

_COLUMNS = ["step", "samples", "lr", "loss", "accuracy", "grad_norm", "test_loss", "test_accuracy", "seconds"]

OnStep = Callable[[int, SyntheticModel], None]


@dataclass(frozen=True, eq=False, repr=False)
class TrainRun(HasTable):
    """A finished training run.

    Attributes:
        model: the model after the last step, in evaluation mode.
        task: the task.
        config: the settings, with the numbers of training and test samples (``n_train``, ``n_test``) and their seed
            (``split_seed``).
        metrics: one row per ``log_every`` steps and per measurement on the test samples: ``step`` and ``samples`` so
            far, ``lr``; means since the previous row of ``loss`` (nats), ``accuracy`` (both with dropout) and
            ``grad_norm`` (before clipping); ``test_loss`` and ``test_accuracy``, NaN where not measured; ``seconds`` of
            training.
        shared: number of test samples that are training samples too, counted; 0 unless the task's ``split`` is
            changed.
        checkpoints: step → file with the weights at the end of an epoch, to read with ``load_checkpoint``.
    """

    model: SyntheticModel
    task: Task
    config: TrainConfig
    metrics: pd.DataFrame
    shared: int
    checkpoints: dict[int, Path] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return int(self.metrics["step"].iloc[-1])

    @property
    def test_accuracy(self) -> float:
        """Last measured test accuracy."""
        return _last(self.metrics["test_accuracy"])

    @property
    def test_loss(self) -> float:
        """Last measured test loss in nats."""
        return _last(self.metrics["test_loss"])

    def split(self, device: str | torch.device | None = None) -> Split:
        """Draw the training and test samples of this run."""
        return self.task.split(self.config.n_train, self.config.n_test, self.config.split_seed, device=device)

    def to_frame(self) -> pd.DataFrame:
        """Return a copy of the metrics."""
        return self.metrics.copy()

    def __repr__(self) -> str:
        config = self.config
        kept = f", {len(self.checkpoints)} checkpoints" if self.checkpoints else ""
        accuracy, loss, seconds = (_last(self.metrics[name]) for name in ("accuracy", "loss", "seconds"))
        return (
            f"TrainRun of {self.model.config.encoding} on {self.task}: {self.steps} steps\n"
            f"  test accuracy {self.test_accuracy:.4f}; in training {accuracy:.4f}, loss {loss:.4g}; "
            f"{seconds:.0f} s{kept}\n"
            f"  {config.n_train} training and {config.n_test} test samples of seed {config.split_seed}, "
            f"{self.shared} in both"
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
    on_step: OnStep | None = None,
    progress: bool = True,
) -> TrainRun:
    """Train a synthetic model on a task, in place.

    The samples, their order and dropout depend only on the seeds in ``config``. After an error or Ctrl-C the model
    keeps its mode and the weights of the last step.

    Args:
        model: the model to train, from its current weights; on CPU or GPU.
        task: source of samples, which the model's ``d_vocab``, ``n_ctx``, ``n_out`` and ``pad_id`` must fit.
        config: settings; default ``TrainConfig()``.
        folder: save the weights there at the end of each epoch, as ``step-000123.safetensors``. A training that was
            stopped is not continued: its last weights can start another one, with a new schedule, moments and order
            (``train(load_checkpoint(path), …)``).
        on_step: function that is called after every step, with the number of steps done and the model: for instance to
            keep a copy of the weights within an epoch (``copy.deepcopy(model)``), or to stop by raising an error.

    Returns:
        A ``TrainRun``: model (in evaluation mode), metrics, checkpoints, and which samples were drawn.

    Raises:
        ValueError: a model that does not fit the task; a loss that is not finite; a folder that already has
            checkpoints.

    Example:
        >>> from tl_posdisent.synthetic import TrainConfig, preset, train
        >>> small, how = preset("small"), TrainConfig(epochs=1, batch_size=64, n_train=3200, n_test=500, lr=1e-2)
        >>> train(small.model("rope", "count"), small.tasks["count"], how, progress=False).test_accuracy > 0.1
        True
    """
    config = config or TrainConfig()
    _check(model, task, config)
    folder = None if folder is None else _empty(Path(folder))
    split = task.split(config.n_train, config.n_test, config.split_seed, device=model.embed.W_E.device)
    shared = split.shared
    save = None if folder is None else partial(_save, model, folder, _notes(task, config, shared))
    devices = range(torch.cuda.device_count())
    # config.precision determines the dtype.
    with with_gradients(model), no_autocast(), torch.random.fork_rng(devices), _training(model):
        torch.manual_seed(config.seed)  # of dropout
        metrics, checkpoints = _run_steps(model, split, config, save, on_step, progress)
    return TrainRun(model, task, config, metrics, shared, checkpoints)


def _notes(task: Any, config: TrainConfig, shared: int) -> dict[str, Any]:
    """Return what a checkpoint says about its training beside the model and the step."""
    training = {**dataclasses.asdict(config), "shared": shared}
    return {"task": {"name": type(task).__name__, **dataclasses.asdict(task)}, "training": training}


def _save(model: SyntheticModel, folder: Path, notes: dict[str, Any], step: int) -> Path:
    return save_checkpoint(model, folder / f"step-{step:06d}.safetensors", {**notes, "step": step})


def _check(model: Any, task: Any, config: Any) -> None:
    """Raise if a model cannot be trained on the task."""
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


def _empty(folder: Path) -> Path:
    """Return the folder, or raise if it is a file or has checkpoints."""
    if folder.exists() and not folder.is_dir():
        raise ArgumentError("folder", f"must be a folder, but {folder} is a file")
    checkpoints = sorted(folder.glob("step-*.safetensors"))
    if checkpoints:
        raise ArgumentError(
            "folder",
            f"must have no checkpoints of another training run, but {checkpoints[-1]} exists: choose another folder, "
            "or read it with load_checkpoint",
        )
    return folder


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Put the model in training mode, and then in evaluation mode; after an error, in its modes before."""
    modes = [(part, part.training) for part in model.modules()]
    model.train()
    try:
        yield
    except BaseException:
        model.zero_grad(set_to_none=True)
        for part, mode in modes:
            part.training = mode
        raise
    model.eval()


def _run_steps(
    model: SyntheticModel,
    split: Split,
    config: TrainConfig,
    save: Callable[[int], Path] | None,
    on_step: OnStep | None,
    progress: bool,
) -> tuple[pd.DataFrame, dict[int, Path]]:
    """Train for all steps; return the metrics, and step → file of the checkpoints."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
    )
    lengths = lengths_of(split.train_tokens, model.config.pad_id).cpu()
    rows: list[dict[str, float]] = []
    recent: list[dict[str, Tensor]] = []  # the numbers of the steps since the last row
    checkpoints: dict[int, Path] = {}
    start = time.perf_counter()
    with tqdm(total=config.steps, desc="training", unit="step", disable=not progress) as bar:
        for step, samples in enumerate(_batches(config, lengths), start=1):
            recent.append(_train_step(model, optimizer, split, samples, lengths, config, step))
            tested = step == config.steps or bool(config.test_every and step % config.test_every == 0)
            if save is not None and step % config.steps_per_epoch == 0:
                _check_losses(recent, step, config)
                checkpoints[step] = save(step)
            if tested or step % config.log_every == 0:
                row = _row(recent, step, config)
                if tested:
                    row["test_loss"], row["test_accuracy"] = evaluate(model, split.test_tokens, split.test_labels)
                rows.append({**row, "seconds": time.perf_counter() - start})
                bar.set_postfix({name: f"{row[name]:.3f}" for name in ("loss", "accuracy")})
                recent = []
            bar.update()
            if on_step is not None:
                on_step(step, model)
    return pd.DataFrame(rows, columns=_COLUMNS), checkpoints


def _batches(config: TrainConfig, lengths: Int[Tensor, " train"]) -> Iterator[Int[Tensor, " sample"]]:
    """Yield the indices of each step's samples, on the CPU, the shortest first; each epoch has its own order."""
    for epoch in range(config.epochs):
        entropy = (config.seed, *b"order", epoch)
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(config.n_train, generator=generator, device="cpu")
        for start in range(0, config.steps_per_epoch * config.batch_size, config.batch_size):
            chosen = order[start : start + config.batch_size]
            yield chosen[lengths[chosen].argsort(stable=True)]


def _train_step(
    model: SyntheticModel,
    optimizer: torch.optim.AdamW,
    split: Split,
    samples: Int[Tensor, " sample"],
    lengths: Int[Tensor, " train"],
    config: TrainConfig,
    step: int,
) -> dict[str, Tensor]:
    """Train on one batch: gradients, clipping, AdamW. Nothing here waits for a GPU."""
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate(step - 1)
    loss, accuracy = _add_gradients(model, split, samples, lengths, config)
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or torch.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss, "accuracy": accuracy, "grad_norm": norm.detach()}


def _add_gradients(
    model: SyntheticModel,
    split: Split,
    samples: Int[Tensor, " sample"],
    lengths: Int[Tensor, " train"],
    config: TrainConfig,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of the mean loss over the samples, without ignored ones; return it, and the accuracy."""
    pad, device = model.config.pad_id, split.train_tokens.device
    loss = right = torch.zeros((), dtype=torch.float32, device=device)
    counted = (split.train_labels[samples.to(device)] != IGNORED).sum().clamp_min(1)
    for piece in samples.tensor_split(min(config.pieces, len(samples))):
        rows = piece.to(device)
        tokens, labels = split.train_tokens[rows, : padded_width(lengths[piece])], split.train_labels[rows]
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            logits = answers(model, tokens, pad)
        part = cross_entropy(logits.float(), labels, reduction="sum") / counted
        part.backward()
        loss = loss + part.detach()
        right = right + (logits.argmax(-1) == labels).sum()
    return loss, right / counted


def _row(recent: list[dict[str, Tensor]], step: int, config: TrainConfig) -> dict[str, float]:
    """Make a row of metrics after ``step``, with the means of the steps since the row before."""
    _check_losses(recent, step, config)
    means = {
        name: torch.stack([numbers[name].float() for numbers in recent]).cpu().double().mean().item()
        for name in recent[0]
    }
    return {"step": step, "samples": config.samples(step), "lr": config.learning_rate(step - 1), **means}


def _check_losses(recent: list[dict[str, Tensor]], step: int, config: TrainConfig) -> None:
    """Raise if a loss of the steps up to ``step`` is not finite."""
    losses = torch.stack([numbers["loss"] for numbers in recent]).cpu()
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        first = step - len(recent) + int(bad[0])
        raise ArgumentError(
            "loss",
            f"must be finite, got {losses[bad[0]].item()} in step {first + 1} of {config.steps}, at learning rate "
            f"{config.learning_rate(first):.3g}: try a lower lr",
        )
