"""Training of synthetic models: fast, seeded, and resumable with identical weights."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.sampling import Task, whole
from tl_posdisent.utils.files import locked, remove_unfinished

from .checkpoints import WEIGHTS, check_shapes, put, read, save_checkpoint, write
from .runs import TrainConfig, TrainRun
from .steps import Training

STATE = "state.safetensors"  # all that a training needs to go on
_MOMENTS = ("first_moment", "second_moment")


class TrainingInterrupted(KeyboardInterrupt):
    """Raised at Ctrl-C during ``train``; ``run`` is the training run up to that step.

    Example:
        >>> from tl_posdisent.synthetic import TrainingInterrupted
        >>> issubclass(TrainingInterrupted, KeyboardInterrupt)  # nothing that catches errors catches it
        True
    """

    def __init__(self, run: TrainRun) -> None:
        super().__init__(f"training interrupted after {run.steps} of {run.config.steps} steps")
        self.run = run


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
    global random state is left alone. So a training run that was interrupted and resumed ends, on a CPU with the same
    number of threads, with the same weights to the last bit as one that was not.

    Ctrl-C lets the step under way end, keeps a checkpoint and the state in ``folder``, and raises
    ``TrainingInterrupted``, a ``KeyboardInterrupt`` with the metrics so far; a second Ctrl-C stops at once, and then
    only what was kept before remains. After any other error the model stays in the mode it was in, with the weights
    of the last step.

    Args:
        model: its weights are where training begins; trained where it is, on CPU or GPU.
        task: the samples. The model's ``d_vocab``, ``n_ctx``, ``n_out`` and ``pad_id`` must fit it; with
            ``pad_id=None`` it reads padding.
        config: how to train; default ``TrainConfig()``, as in the paper.
        folder: keep ``step-000123.safetensors`` there for each of ``config.checkpoints`` and the end, and
            ``state.safetensors``, with which ``resume`` goes on. Without it nothing is kept. One training at a time
            may write to a folder.
        resume: go on from the state in ``folder``, if there is one.
        stop_at: leave off after this step, to go on another time.
        on_step: called with the number of steps done and the model after every step.
        progress: show a bar with loss and accuracy.

    Returns:
        ``TrainRun``: model (in evaluation mode), metrics, checkpoints.

    Raises:
        ValueError: a model that does not fit the task; a loss that is NaN or infinite; ``resume`` without a folder,
            or a folder that holds another training, or a state that is damaged; a folder with a state, without
            ``resume``; a folder in which another training is running.
        TrainingInterrupted: Ctrl-C.

    Example:
        >>> from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel, TrainConfig, TriggerCount, train
        >>> task = TriggerCount(d_vocab=8, n_triggers=1, max_count=3, min_length=6, max_length=6, n_ctx=6)
        >>> shape = dict(d_vocab=task.d_vocab, n_ctx=task.n_ctx, n_out=task.n_out, pad_id=task.pad_id)
        >>> model = SyntheticModel(SyntheticConfig(n_layers=1, d_model=32, n_heads=2, d_mlp=32, **shape))
        >>> config = TrainConfig(epochs=2, batch_size=64, n_train=6400, n_test=500, lr=1e-2)
        >>> train(model, task, config, progress=False).test_accuracy > 0.9
        True
    """
    config = config or TrainConfig()
    _check(model, task, config, stop_at)
    with _alone_in(folder):
        kept = _Kept(model, task, config, folder, resume=resume)
        training = Training(model, task, config)
        if resume:
            kept.load(training)
        modes = [(part, part.training) for part in model.modules()]
        model.train()
        try:
            with _ctrl_c_waits() as pressed, _own_random_state(training.device):
                _run(training, kept, min(config.steps, stop_at or config.steps), on_step, pressed, progress)
        except BaseException:
            model.zero_grad(set_to_none=True)
            for part, mode in modes:
                part.training = mode
            raise
    model.eval()
    run = TrainRun(model, task, config, training.frame(), kept.checkpoints)
    if pressed:
        raise TrainingInterrupted(run)
    return run


@contextlib.contextmanager
def _alone_in(folder: str | Path | None) -> Iterator[None]:
    """Hold the lock of the training's folder, without what a killed training left unfinished in it."""
    if folder is None:
        yield
        return
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ValueError(f"folder must be that of the training, but {folder} is a file")
    with locked(folder, "folder", "training"):
        for names in ("step-*", f"{STATE}.*"):
            remove_unfinished(folder, names)
        yield


def _run(
    training: Training,
    kept: _Kept,
    end: int,
    on_step: Callable[[int, SyntheticModel], None] | None,
    pressed: list[int],
    progress: bool,
) -> None:
    """Steps from where the training is to ``end``, with what is to be measured and kept on the way."""
    config, model = training.config, training.model
    if training.done == 0 and 0 in config.checkpoints:
        kept.weights(0)
    with tqdm(total=config.steps, initial=training.done, desc="training", unit="step", disable=not progress) as bar:
        while training.done < end and not pressed:
            training.step()
            done, last = training.done, training.done == end
            keep = done in config.checkpoints
            test = keep or done == config.steps or (config.test_every is not None and done % config.test_every == 0)
            if test or last or done % config.log_every == 0:
                training.log(test=test)
                bar.set_postfix_str("loss {loss:.3f}, accuracy {accuracy:.3f}".format(**training.rows[-1]))
            bar.update()
            if keep or last:
                kept.all(training)
            if on_step is not None:
                on_step(done, model)
    if pressed:  # Ctrl-C: the bar ends, what was done is kept
        training.log(test=False)
        kept.all(training)


class _Kept:
    """What a training keeps in its folder; nothing without one."""

    def __init__(
        self, model: SyntheticModel, task: Task, config: TrainConfig, folder: str | Path | None, *, resume: bool
    ) -> None:
        if resume and folder is None:
            raise ValueError("folder must be given with resume=True, got None")
        self.model, self.folder = model, None if folder is None else Path(folder)
        self.state = None if self.folder is None else self.folder / STATE
        self.parts: dict[str, Any] = {"model": model.config, "task": task, "training": config}
        self.notes: dict[str, Any] = {part: _plain(dataclasses.asdict(of)) for part, of in self.parts.items()}
        self.notes["task"]["name"] = type(task).__name__
        self.checkpoints: dict[int, Path] = {}
        if not resume and self.state is not None and self.state.exists():
            raise ValueError(f"folder must hold no training unless resume=True, but there is {self.state}")

    def weights(self, step: int) -> None:
        """A checkpoint."""
        if self.folder is not None:
            path = self.folder / f"step-{step:06d}.safetensors"
            self.checkpoints[step] = save_checkpoint(self.model, path, {**self.notes, "step": step})

    def all(self, training: Training) -> None:
        """A checkpoint, and the state to go on from."""
        self.weights(training.done)
        if self.state is not None:
            groups = dict(zip((WEIGHTS, *_MOMENTS), (self.model.state_dict(), *training.moments()), strict=True))
            kept = {str(step): path.name for step, path in self.checkpoints.items()}
            write(self.state, groups, {**self.notes, "done": training.done, "rows": training.rows, "kept": kept})

    def load(self, training: Training) -> None:
        """The state, if there is one, into model and training; or a refusal that leaves both as they were."""
        if self.folder is None or self.state is None or not self.state.exists():
            return
        groups, notes = read(self.state)
        for part, here in self.notes.items():
            there = notes.get(part, {})
            # What a setting was before there was such a setting is its default.
            there = _defaults(self.parts[part]) | (there if isinstance(there, dict) else {})
            for name in {**here, **there}:
                if here.get(name) != there.get(name):
                    raise ValueError(
                        f"folder must hold this training to be resumed, but {self.state} has {part} {name}="
                        f"{there.get(name)!r}, not {here.get(name)!r}"
                    )
        for group in _MOMENTS:
            check_shapes(group, groups.get(group, {}), training.named, self.state)
        try:
            done, rows = int(notes["done"]), list(notes["rows"])
            # Names alone: whatever the file says, it is the folder that is looked into.
            kept = {int(step): self.folder / Path(name).name for step, name in notes["kept"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"folder must hold a whole training, but {self.state} is damaged: {error!r}") from error
        put(self.model, groups.get(WEIGHTS, {}), self.state)
        training.go_on(done, rows, *(groups[group] for group in _MOMENTS))
        self.checkpoints = kept


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON gives them back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def _defaults(settings: Any) -> dict[str, Any]:
    fields = [field for field in dataclasses.fields(settings) if field.default is not dataclasses.MISSING]
    return _plain({field.name: field.default for field in fields})


def _check(model: SyntheticModel, task: Task, config: TrainConfig, stop_at: int | None) -> None:
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
        whole("stop_at", stop_at, least=1)


@contextlib.contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    """Dropout draws from the global state. Afterwards that is as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C has been pressed; pressed again, it acts as usual.

    Only where Python's own handler stands: whoever put another there has plans of their own.
    """
    pressed: list[int] = []
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield pressed
        return

    def wait(number: int, frame: Any) -> None:
        if pressed:
            signal.default_int_handler(number, frame)
        pressed.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, usual)
