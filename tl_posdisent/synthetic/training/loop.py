"""A training loop that resumes exactly: steps, metrics, and a folder with checkpoints and the state."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from tl_posdisent.utils.files import locked, remove_unfinished

from .checkpoints import WEIGHTS, check_shapes, put, read, write

STATE = "state.safetensors"
_MOMENTS = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"}

Settings = dict[str, dict[str, Any]]
"""Part (``"model"``, ``"task"`` …) → name → value, as JSON returns it."""


class TrainingLoop(ABC):
    """Train a model with AdamW, from its initial weights or from the state in a folder.

    The state holds all that the next step depends on: weights, moments, the number of steps done, and torch's random
    state of the CPU. So a resumed training run ends with the same weights as an uninterrupted one. A subclass defines
    the batches and the loss (``gradients``), what is measured and what is saved.

    Attributes:
        model: trained in place.
        optimizer: of all parameters of the model.
        steps: number of steps of the whole training run.
        clip: greatest norm of the gradient; None for no clipping.
        log_every: steps per row of metrics.
        folder: of checkpoints and state; None keeps nothing.
        done: number of steps done.
        rows: the metrics, one dict per row.
        checkpoints: step → file with its weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        *,
        steps: int,
        clip: float | None,
        log_every: int,
        folder: str | Path | None,
    ) -> None:
        self.model, self.optimizer, self.steps, self.clip, self.log_every = model, optimizer, steps, clip, log_every
        self.folder = None if folder is None else Path(folder)
        self.named = dict(model.named_parameters())
        self.device = next(model.parameters()).device
        self.done = 0
        self.rows: list[dict[str, Any]] = []
        self.checkpoints: dict[int, Path] = {}
        self._recent: list[dict[str, Tensor]] = []
        self._started, self._seconds_before = time.perf_counter(), 0.0

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Add the gradients of step ``self.done``; return ``"loss"`` and others that a row of metrics averages."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """The rate of step 0, 1, …"""

    @abstractmethod
    def settings(self, done: int) -> Settings:
        """What determines the first steps; a state with other settings is not resumed."""

    @abstractmethod
    def save_weights(self, path: Path) -> None:
        """Write a checkpoint."""

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Columns of a row at which ``measures`` is true, on data that is not trained on."""

    @abstractmethod
    def measures(self, done: int) -> bool:
        """Whether ``measure`` is called after so many steps."""

    @abstractmethod
    def keeps(self, done: int) -> bool:
        """Whether a checkpoint and the state are saved after so many steps; they always are after the last."""

    def run(
        self,
        *,
        resume: bool = False,
        stop_at: int | None = None,
        on_step: Callable[[int, Any], None] | None = None,
        progress: bool = True,
    ) -> bool:
        """Train to the end, to ``stop_at`` or to Ctrl-C, and return whether it was Ctrl-C.

        The model ends in evaluation mode; after an error it stays in its modes, with the weights of the last step.

        Raises:
            ValueError: a loss that is not finite; ``resume`` without a folder, or a folder with another training run or
                a damaged state; a folder with a state, without ``resume``; a folder in which another one is running.
        """
        if resume and self.folder is None:
            raise ValueError("folder must be given with resume=True, got None")
        devices = [self.device] if self.device.type == "cuda" else []
        with _alone_in(self.folder), torch.random.fork_rng(devices):
            self._load_state(resume)
            modes = [(part, part.training) for part in self.model.modules()]
            self.model.train()
            try:
                with _deferred_ctrl_c() as pressed:
                    self._run_steps(min(self.steps, stop_at or self.steps), on_step, pressed, progress)
            except BaseException:
                self.model.zero_grad(set_to_none=True)
                for part, mode in modes:
                    part.training = mode
                raise
        self.model.eval()
        return bool(pressed)

    def _run_steps(
        self, end: int, on_step: Callable[[int, Any], None] | None, pressed: list[int], progress: bool
    ) -> None:
        if self.done == 0 and self.keeps(0):
            self._save_checkpoint()
        with tqdm(total=self.steps, initial=self.done, desc="training", unit="step", disable=not progress) as bar:
            while self.done < end and not pressed:
                self._step()
                last, measured = self.done == end, self.measures(self.done)
                if measured or last or self.done % self.log_every == 0:
                    self._log(measured)
                    row = self.rows[-1]
                    bar.set_postfix_str(
                        ", ".join(f"{name} {row[name]:.3f}" for name in ("loss", "accuracy") if name in row)
                    )
                bar.update()
                if self.keeps(self.done) or last:
                    self._save()
                if on_step is not None:
                    on_step(self.done, self.model)
        if pressed:
            self._log(measured=False)
            self._save()

    def _step(self) -> None:
        """One batch: gradients, clipping, AdamW. Nothing here waits for a GPU."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.done)
        numbers = self.gradients()
        norm = nn.utils.clip_grad_norm_(self.named.values(), self.clip or torch.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self._recent.append({**numbers, "grad_norm": norm.detach()})

    def _log(self, measured: bool) -> None:
        """Add a row about the steps since the last row, if there were any."""
        if not self._recent:
            return
        recent = {name: torch.stack([x[name].float() for x in self._recent]).cpu() for name in self._recent[0]}
        bad = (~recent["loss"].isfinite()).nonzero()
        if len(bad):
            step = self.done - len(self._recent) + int(bad[0])
            raise ValueError(
                f"loss must be finite, got {recent['loss'][bad[0]].item()} in step {step + 1} of {self.steps}, at "
                f"learning rate {self.learning_rate(step):.3g}: try a lower lr"
            )
        row: dict[str, Any] = {"step": self.done, "lr": self.learning_rate(max(0, self.done - 1))}
        row |= {name: values.double().mean().item() for name, values in recent.items()}
        row |= self.measure() if measured else {}
        row["seconds"] = self._seconds_before + time.perf_counter() - self._started
        self.rows.append(row)
        self._recent = []

    def _save_checkpoint(self) -> None:
        if self.folder is not None:
            path = self.folder / f"step-{self.done:06d}.safetensors"
            self.save_weights(path)
            self.checkpoints[self.done] = path

    def _save(self) -> None:
        """A checkpoint, and the state to resume from."""
        self._save_checkpoint()
        if self.folder is None:
            return
        groups = {
            group: {name: self.optimizer.state[p][key] for name, p in self.named.items()}
            for group, key in _MOMENTS.items()
        }
        groups |= {WEIGHTS: self.model.state_dict(), "random": {"cpu": torch.get_rng_state()}}
        kept = {str(step): path.name for step, path in self.checkpoints.items()}
        notes = {**self.settings(self.done), "done": self.done, "rows": self.rows, "kept": kept}
        write(self.folder / STATE, groups, notes)

    def _load_state(self, resume: bool) -> None:
        """Read the state, if there is one, or raise and leave model and optimizer as they were."""
        if self.folder is None or not (self.folder / STATE).exists():
            return
        path = self.folder / STATE
        if not resume:
            raise ValueError(f"folder must hold no training unless resume=True, but there is {path}")
        groups, notes = read(path)
        try:
            done, rows = int(notes["done"]), list(notes["rows"])
            # Names only: whatever the file says, the files are those of this folder.
            kept = {int(step): self.folder / Path(name).name for step, name in notes["kept"].items()}
            random, moments = groups["random"]["cpu"], {group: groups[group] for group in _MOMENTS}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"folder must hold a whole training, but {path} is damaged: {error!r}") from error
        for part, here in self.settings(done).items():
            _check_same_settings(path, part, here, notes.get(part))
        for group, tensors in moments.items():
            check_shapes(group, tensors, self.named, path)
        put(self.model, groups.get(WEIGHTS, {}), path)
        names = {p: name for name, p in self.named.items()}
        order = [names[p] for group in self.optimizer.param_groups for p in group["params"]]
        states = {
            n: {"step": torch.tensor(float(done)), **{_MOMENTS[group]: x[name] for group, x in moments.items()}}
            for n, name in enumerate(order)
        }
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": states})
        torch.set_rng_state(random)
        self.done, self.rows, self.checkpoints = done, rows, kept
        self._seconds_before = rows[-1]["seconds"] if rows else 0.0


def _check_same_settings(path: Path, part: str, here: Mapping[str, Any], there: Any) -> None:
    there = there if isinstance(there, dict) else {}
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            raise ValueError(
                f"folder must hold this training to be resumed, but {path} has {part} {name}={there.get(name)!r}, not "
                f"{here.get(name)!r}: resume with the settings that it was started with, or choose another folder"
            )


@contextlib.contextmanager
def _alone_in(folder: Path | None) -> Iterator[None]:
    """Hold the lock of the folder, and remove unfinished files of a killed process from it."""
    if folder is None:
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be that of the training, but {folder} is a file")
    with locked(folder, "folder", "training"):
        for names in ("step-*", f"{STATE}.*"):
            remove_unfinished(folder, names)
        yield


@contextlib.contextmanager
def _deferred_ctrl_c() -> Iterator[list[int]]:
    """A list that is no longer empty after Ctrl-C; a second Ctrl-C acts as usual.

    Only in the main thread and in place of Python's own handler: another handler stays.
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
