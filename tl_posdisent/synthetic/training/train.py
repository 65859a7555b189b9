"""Training of synthetic models: fast, seeded, and resumable with identical weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.sampling import IGNORED, Task
from tl_posdisent.utils.validation import check_integer

from .checkpoints import save_checkpoint
from .evaluate import answers, evaluate, lengths_of, padded_width
from .loop import Settings, TrainingLoop
from .runs import TrainConfig, TrainRun

_COLUMNS = ["step", "samples", "lr", "loss", "accuracy", "grad_norm", "test_loss", "test_accuracy", "seconds"]


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

    Everything that is drawn (order of samples, dropout) follows from ``config.seed`` and the number of the step; the
    global random state is restored. So a resumed training run ends with the same weights, to the last bit, as an
    uninterrupted one (on a CPU with the same number of threads). After an error or Ctrl-C the model keeps its mode and
    the weights of the last step.

    Args:
        model: its weights are where training begins; trained where it is, on CPU or GPU.
        task: the samples. The model's ``d_vocab``, ``n_ctx``, ``n_out`` and ``pad_id`` must fit it; with
            ``pad_id=None`` it reads padding.
        config: how to train; default ``TrainConfig()``, as in the paper.
        folder: save ``step-000123.safetensors`` there for each of ``config.checkpoints`` and the end, and
            ``state.safetensors``, from which ``resume`` continues, at these steps and once a minute. Without it nothing
            is saved. One training at a time may write to a folder.
        resume: continue from the state in ``folder``, if there is one.
        stop_at: stop after this step, to resume another time.
        on_step: called with the number of steps done and the model after every step.
        progress: show a bar with loss and accuracy.

    Returns:
        ``TrainRun``: model (in evaluation mode), metrics, checkpoints.

    Raises:
        ValueError: a model that does not fit the task; a loss that is NaN or infinite; ``resume`` without a folder,
            with another training in it, or with a damaged state; a folder with a state, without ``resume``; a folder in
            which another training is running.

    Example:
        >>> from tl_posdisent.synthetic import TrainConfig, preset, train
        >>> small, how = preset("small"), TrainConfig(epochs=1, batch_size=64, n_train=3200, n_test=500, lr=1e-2)
        >>> train(small.model("rope", "count"), small.tasks["count"], how, progress=False).test_accuracy > 0.1
        True
    """
    config = config or TrainConfig()
    for name, value, kind in (("model", model, SyntheticModel), ("task", task, Task), ("config", config, TrainConfig)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    for name in ("d_vocab", "n_out", "n_ctx"):
        has, needs = getattr(model.config, name), getattr(task, name)
        if has < needs:
            raise ValueError(f"model must have {name} of {needs} or more for this task, got {has}")
    if model.config.pad_id not in (None, task.pad_id):
        raise ValueError(
            f"model must have pad_id={task.pad_id}, the task's, or None to read padding as a token, got "
            f"{model.config.pad_id}"
        )
    if stop_at is not None:
        check_integer("stop_at", stop_at, 1)
    training = TaskTraining(model, task, config, folder)
    training.run(resume=resume, stop_at=stop_at, on_step=on_step, progress=progress)
    rows = [{**row, "samples": config.samples(row["step"])} for row in training.rows]
    return TrainRun(model, task, config, pd.DataFrame(rows, columns=_COLUMNS), training.checkpoints)


class TaskTraining(TrainingLoop):
    """Training on the samples of a task. Orders and dropout are drawn from the seed and the number of epoch or step."""

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
        self.epoch, self.order = -1, torch.empty(0)

    def gradients(self) -> dict[str, Tensor]:
        """Of the mean loss of the step's samples that count."""
        torch.manual_seed(_seed_of(self.config.seed, "dropout", self.done))
        chosen = self.samples()
        loss = right = torch.zeros((), device=self.device)
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

    def samples(self) -> Int[Tensor, "sample"]:
        """Which samples the step uses, on the CPU, the shortest first."""
        size = self.config.batch_size
        epoch, within = divmod(self.done, self.config.steps_per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(_seed_of(self.config.seed, "order", epoch))
            self.epoch, self.order = epoch, torch.randperm(self.config.n_train, generator=generator)
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

    def measures(self, done: int) -> bool:
        """At checkpoints, every ``test_every`` steps and at the end."""
        every = self.config.test_every
        return done in self.config.checkpoints or done == self.steps or (every is not None and done % every == 0)

    def measure(self) -> dict[str, float]:
        loss, accuracy = evaluate(self.model, self.split.test_tokens, self.split.test_labels)
        return {"test_loss": loss, "test_accuracy": accuracy}

    def keeps(self, done: int) -> bool:
        return done in self.config.checkpoints


def _seed_of(seed: int, what: str, number: int) -> int:
    """Independent seeds for each order and each step, whichever numbers they start from."""
    entropy = (seed, *what.encode(), number)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
