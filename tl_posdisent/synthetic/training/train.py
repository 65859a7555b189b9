"""Train a synthetic model, reproducibly from its seeds."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from tl_posdisent.synthetic.model.config import SyntheticConfig
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.task import IGNORED, Split, Task
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import HasTable

from .evaluation import answers, evaluate, lengths_of, padded_width

_COLUMNS = ["step", "samples", "lr", "loss", "accuracy", "grad_norm", "test_loss", "test_accuracy", "seconds"]

OnStep = Callable[[int, SyntheticModel], None]


@dataclass(frozen=True, eq=False, repr=False)
class TrainRun(HasTable):
    """A finished training run.

    Attributes:
        model: the model after the last step, in evaluation mode; ``model.config`` has the settings.
        task: the task.
        metrics: one row per ``log_every`` steps and per measurement on the test samples: ``step`` and ``samples`` so
            far, ``lr``; means since the previous row of ``loss`` (nats), ``accuracy`` (both with dropout) and
            ``grad_norm`` (before clipping); ``test_loss`` and ``test_accuracy``, NaN where not measured; ``seconds`` of
            training.
    """

    model: SyntheticModel
    task: Task
    metrics: pd.DataFrame

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return int(self.metrics["step"].iloc[-1])

    @property
    def test_accuracy(self) -> float:
        """Test accuracy after the last step."""
        return float(self.metrics["test_accuracy"].iloc[-1])

    @property
    def test_loss(self) -> float:
        """Test loss in nats after the last step."""
        return float(self.metrics["test_loss"].iloc[-1])

    def split(self) -> Split:
        """Draw the training and test samples of this run."""
        config = self.model.config
        return self.task.split(config.n_train, config.n_test, config.split_seed)

    def to_frame(self) -> pd.DataFrame:
        """Return a copy of the metrics."""
        return self.metrics.copy()

    def __repr__(self) -> str:
        last = self.metrics.iloc[-1]
        return (
            f"TrainRun of {self.model.config.encoding} on {self.task}: {self.steps} steps\n"
            f"  test accuracy {self.test_accuracy:.4f}; in training {last['accuracy']:.4f}, loss {last['loss']:.4g}; "
            f"{last['seconds']:.0f} s"
        )


def train(model: SyntheticModel, task: Task, *, on_step: OnStep | None = None, progress: bool = True) -> TrainRun:
    """Train a synthetic model on a task, in place, as its settings say (``model.config``).

    The samples, their order and dropout depend only on the seeds there. After an error or Ctrl-C the model keeps its
    mode and the weights of the last step.

    Args:
        model: the model to train, from its current weights; on CPU or GPU.
        task: source of samples, which the model's ``d_vocab``, ``n_ctx``, ``n_out`` and ``pad_id`` must fit.
        on_step: function that is called after every step, with the number of steps done and the model: for instance to
            keep a copy (``copy.deepcopy(model)``), to write a file (``save_checkpoint``), or to stop by raising an
            error.

    Returns:
        A ``TrainRun``: the model (in evaluation mode), the task and the metrics.

    Raises:
        ValueError: a model that does not fit the task; a loss that is not finite.

    Example:
        >>> from tl_posdisent.synthetic import preset, train
        >>> small = preset("small")
        >>> model = small.model("rope", "count", batch_size=64, n_train=3200, n_test=500, lr=1e-2)
        >>> train(model, small.tasks["count"], progress=False).test_accuracy > 0.1
        True
    """
    _check(model, task)
    config, device = model.config, model.embed.W_E.device
    split = Split(*(x.to(device) for x in vars(task.split(config.n_train, config.n_test, config.split_seed)).values()))
    with torch.enable_grad(), torch.random.fork_rng(range(torch.cuda.device_count())), _training(model):
        torch.manual_seed(config.seed)  # of dropout
        metrics = _run_steps(model, split, on_step, progress)
    return TrainRun(model, task, metrics)


def _check(model: Any, task: Any) -> None:
    """Raise if a model cannot be trained on the task."""
    for name, value, kind in (("model", model, SyntheticModel), ("task", task, Task)):
        if not isinstance(value, kind):
            raise ArgumentError(name, f"must be a {kind.__name__}, got {type(value).__name__}")
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


def _run_steps(model: SyntheticModel, split: Split, on_step: OnStep | None, progress: bool) -> pd.DataFrame:
    """Train for all steps; return the metrics."""
    config = model.config
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
    )
    lengths = lengths_of(split.train_tokens, config.pad_id).cpu()
    rows: list[dict[str, float]] = []
    recent: list[dict[str, Tensor]] = []  # the numbers of the steps since the last row
    start = time.perf_counter()
    with tqdm(total=config.steps, desc="training", unit="step", disable=not progress) as bar:
        for step, samples in enumerate(_batches(config, lengths), start=1):
            recent.append(_train_step(model, optimizer, split, samples, lengths, step))
            tested = step == config.steps or bool(config.test_every and step % config.test_every == 0)
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
    return pd.DataFrame(rows, columns=_COLUMNS)


def _batches(config: SyntheticConfig, lengths: Int[Tensor, " train"]) -> Iterator[Int[Tensor, " sample"]]:
    """Yield the indices of each step's samples, on the CPU, the shortest first; each epoch has its own order."""
    for epoch in range(config.epochs):
        entropy = (config.seed, *b"order", epoch)
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        order = torch.randperm(config.n_train, generator=torch.Generator().manual_seed(seed))
        for start in range(0, config.steps_per_epoch * config.batch_size, config.batch_size):
            chosen = order[start : start + config.batch_size]
            yield chosen[lengths[chosen].argsort(stable=True)]


def _train_step(
    model: SyntheticModel,
    optimizer: torch.optim.AdamW,
    split: Split,
    samples: Int[Tensor, " sample"],
    lengths: Int[Tensor, " train"],
    step: int,
) -> dict[str, Tensor]:
    """Train on one batch: gradients, clipping, AdamW. Nothing here waits for a GPU."""
    for group in optimizer.param_groups:
        group["lr"] = model.config.learning_rate(step - 1)
    loss, accuracy = _add_gradients(model, split, samples, lengths)
    norm = nn.utils.clip_grad_norm_(model.parameters(), model.config.clip or torch.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss, "accuracy": accuracy, "grad_norm": norm.detach()}


def _add_gradients(
    model: SyntheticModel, split: Split, samples: Int[Tensor, " sample"], lengths: Int[Tensor, " train"]
) -> tuple[Tensor, Tensor]:
    """Add the gradients of the mean loss over the samples, without ignored ones; return it, and the accuracy."""
    config, device = model.config, split.train_tokens.device
    loss = right = torch.zeros((), device=device)
    counted = (split.train_labels[samples.to(device)] != IGNORED).sum().clamp_min(1)
    for piece in samples.tensor_split(min(config.pieces, len(samples))):
        rows = piece.to(device)
        tokens, labels = split.train_tokens[rows, : padded_width(lengths[piece])], split.train_labels[rows]
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            logits = answers(model(tokens, checked=True), tokens, config.pad_id)
        part = cross_entropy(logits.float(), labels, reduction="sum") / counted
        part.backward()
        loss = loss + part.detach()
        right = right + (logits.argmax(-1) == labels).sum()
    return loss, right / counted


def _row(recent: list[dict[str, Tensor]], step: int, config: SyntheticConfig) -> dict[str, float]:
    """Make a row of metrics after ``step``, with the means of the steps since the row before."""
    means = {
        name: torch.stack([numbers[name].float() for numbers in recent]).cpu().double().mean().item()
        for name in recent[0]
    }
    if not math.isfinite(means["loss"]):
        first = step - len(recent) + 1
        raise ArgumentError("loss", f"must be finite, got {means['loss']} in steps {first} to {step}: try a lower lr")
    return {"step": step, "samples": config.samples(step), "lr": config.learning_rate(step - 1), **means}
