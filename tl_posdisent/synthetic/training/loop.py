"""A training loop that resumes exactly, and its files: checkpoints and state in safetensors, without pickle."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from tqdm.auto import tqdm

from tl_posdisent.models.loading.load import check_device
from tl_posdisent.synthetic.model.config import SyntheticConfig
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.files import locked, remove_unfinished, whole_file

WEIGHTS = "weights"


def save_checkpoint(model: SyntheticModel, path: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
    """Save the weights and the configuration of a synthetic model to a safetensors file, atomically.

    Args:
        model: any ``SyntheticModel``.
        path: where to save, also the return value. Folders are created; an existing file is replaced.
        notes: a JSON-compatible mapping that is saved in the same file.

    Raises:
        ValueError: another kind of model; notes that are not JSON-compatible.
        OSError: the file cannot be written; an existing file is kept.

    Example:
        >>> import tempfile, torch
        >>> from tl_posdisent.synthetic import load_checkpoint, preset, save_checkpoint
        >>> model, tokens = preset("small").model("rope", "count", seed=1), torch.arange(8)[None]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load_checkpoint(save_checkpoint(model, f"{folder}/model.safetensors"))
        >>> torch.equal(model(tokens), again(tokens))
        True
    """
    if not isinstance(model, SyntheticModel):
        raise ArgumentError("model", f"must be a SyntheticModel, got {type(model).__name__}")
    return write(path, {WEIGHTS: model.state_dict()}, {**(notes or {}), "model": dataclasses.asdict(model.config)})


def load_checkpoint(path: str | Path, *, device: str | torch.device = "cpu") -> SyntheticModel:
    """Load a synthetic model that ``save_checkpoint`` or ``train`` saved, in evaluation mode.

    Raises:
        ValueError: a file that is missing, damaged or not a checkpoint; a device that torch cannot use.

    Example:
        >>> from tl_posdisent.synthetic import load_checkpoint
        >>> load_checkpoint("nowhere.safetensors")
        Traceback (most recent call last):
        tl_posdisent.utils.errors.ArgumentError: path must be a checkpoint, but nowhere.safetensors does not exist
    """
    device = check_device(device) or "cpu"
    tensors, notes = read(path)
    try:
        shape: Any = {name: tuple(x) if isinstance(x, list) else x for name, x in notes["model"].items()}
        model = SyntheticModel(SyntheticConfig(**shape))
    except (AttributeError, KeyError, TypeError) as error:
        raise ArgumentError("path", f"must be a checkpoint of a SyntheticModel, got {path}: {error!r}") from error
    put(model, tensors.get(WEIGHTS, {}), path)
    model.to(device).eval()
    return model


def put(model: nn.Module, weights: Mapping[str, Tensor], path: str | Path) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()  # the first of possibly many mismatches
        raise ValueError(f"weights in {path} must fit the model: {first}") from error


def write(path: str | Path, groups: Mapping[str, Mapping[str, Tensor]], notes: Mapping[str, Any]) -> Path:
    """Write groups of named tensors and notes into one file, atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{g}/{name}": x.detach().cpu().clone() for g, group in groups.items() for name, x in group.items()}
    try:
        metadata = {"notes": json.dumps(notes)}
    except (TypeError, ValueError) as error:
        raise ArgumentError("notes", f"must be JSON-compatible: {error}") from error
    content = save(tensors, metadata=metadata)
    with whole_file(path) as file:
        file.write(content)
    return path


def read(path: str | Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read a file of ``write``; raise ValueError if it is missing or damaged."""
    if not Path(path).is_file():
        raise ArgumentError("path", f"must be a checkpoint, but {path} does not exist")
    groups: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            notes = json.loads((file.metadata() or {})["notes"])
            for key in file.keys():  # noqa: SIM118 - not a dict
                group, _, name = key.partition("/")
                groups.setdefault(group, {})[name] = file.get_tensor(key)
        if not isinstance(notes, dict):
            raise ValueError(f"its notes are a {type(notes).__name__}")
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise ArgumentError("path", f"must be a whole checkpoint, but {path} cannot be read: {error}") from error
    return groups, notes


STATE = "state.safetensors"
_SECONDS = 60.0  # least time between saved states

Settings = dict[str, dict[str, Any]]
"""Settings as nested dicts: part (``"model"``, ``"task"`` …) → name → value, as JSON returns it."""


class TrainingLoop(ABC):
    """Train a model with AdamW, from its initial weights or from the state in a folder.

    The state holds everything that the next step depends on: weights, moments, the number of steps done, and torch's
    random state of the CPU. It is saved with every checkpoint, and once a minute with a row of metrics.

    Attributes:
        steps, done: number of steps of the whole training run, and of those done.
        clip, log_every: as in ``TrainConfig``.
        folder: folder of checkpoints and state; None saves nothing.
        rows, checkpoints: the metrics, one dict per row; step → file with its weights.
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
        self.device = next(model.parameters()).device
        self.done = 0
        self.rows: list[dict[str, Any]] = []
        self.checkpoints: dict[int, Path] = {}
        self._recent: list[dict[str, Tensor]] = []
        self._saved = self._started = time.perf_counter()
        self._seconds_before = 0.0

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Add the gradients of step ``self.done``; return ``"loss"`` and others that a row of metrics averages."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step 0, 1, …"""

    @abstractmethod
    def settings(self, done: int) -> Settings:
        """Return the settings that determine the first ``done`` steps; a state with other settings is not resumed."""

    @abstractmethod
    def save_weights(self, path: Path) -> None:
        """Write a checkpoint."""

    @abstractmethod
    def measure(self, done: int) -> dict[str, float]:
        """Measure columns of metrics on held-out data; return none if no measurement is due after ``done`` steps."""

    @abstractmethod
    def keeps(self, done: int) -> bool:
        """Say whether a checkpoint is saved after ``done`` steps; after the last step it always is."""

    def run(
        self,
        *,
        resume: bool = False,
        stop_at: int | None = None,
        on_step: Callable[[int, Any], None] | None = None,
        progress: bool = True,
    ) -> None:
        """Train to the end or to ``stop_at``; see ``train`` for the errors.

        The model ends in evaluation mode. After an error it keeps its mode, with the weights of the last step.
        """
        if resume and self.folder is None:
            raise ArgumentError("folder", "must be given with resume=True, got None")
        with contextlib.ExitStack() as held:
            if self.folder is not None:
                if self.folder.exists() and not self.folder.is_dir():
                    raise ArgumentError("folder", f"must be a folder, but {self.folder} is a file")
                held.enter_context(locked(self.folder, "folder", "training"))
                for names in ("step-*", f"{STATE}.*"):  # left by a killed process
                    remove_unfinished(self.folder, names)
            kind = "cuda" if self.device.type == "cpu" else self.device.type
            held.enter_context(
                torch.random.fork_rng([] if self.device.type == "cpu" else [self.device], device_type=kind)
            )
            self._load_state(resume)
            modes = [(part, part.training) for part in self.model.modules()]
            self.model.train()
            try:
                self._run_steps(min(self.steps, stop_at or self.steps), on_step, progress)
            except BaseException:
                self.model.zero_grad(set_to_none=True)
                for part, mode in modes:
                    part.training = mode
                raise
        self.model.eval()

    def _run_steps(self, end: int, on_step: Callable[[int, Any], None] | None, progress: bool) -> None:
        if self.done == 0 and self.keeps(0):
            self._save_checkpoint()
        with tqdm(total=self.steps, initial=self.done, desc="training", unit="step", disable=not progress) as bar:
            while self.done < end:
                self._step()
                kept, measured = self.done == end or self.keeps(self.done), self.measure(self.done)
                bar.update()
                if kept or measured or self.done % self.log_every == 0:
                    row = self._log(measured)
                    bar.set_postfix({name: f"{row[name]:.3f}" for name in ("loss", "accuracy") if name in row})
                    if kept:
                        self._save_checkpoint()
                    if kept or time.perf_counter() - self._saved > _SECONDS:
                        self._save_state()
                if on_step is not None:
                    on_step(self.done, self.model)

    def _step(self) -> None:
        """Train on one batch: gradients, clipping, AdamW. Nothing here waits for a GPU."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.done)
        numbers = self.gradients()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or torch.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self._recent.append({**numbers, "grad_norm": norm.detach()})

    def _log(self, measured: dict[str, float]) -> dict[str, Any]:
        """Add a row about the steps since the last row."""
        recent = {name: torch.stack([x[name].float() for x in self._recent]).cpu() for name in self._recent[0]}
        bad = (~recent["loss"].isfinite()).nonzero()
        if len(bad):
            step = self.done - len(self._recent) + int(bad[0])
            raise ArgumentError(
                "loss",
                f"must be finite, got {recent['loss'][bad[0]].item()} in step {step + 1} of {self.steps}, at "
                f"learning rate {self.learning_rate(step):.3g}: try a lower lr",
            )
        row: dict[str, Any] = {"step": self.done, "lr": self.learning_rate(self.done - 1)}
        row |= {name: values.double().mean().item() for name, values in recent.items()}
        row |= measured
        row["seconds"] = self._seconds_before + time.perf_counter() - self._started
        self.rows.append(row)
        self._recent = []
        return row

    def _save_checkpoint(self) -> None:
        if self.folder is not None:
            path = self.folder / f"step-{self.done:06d}.safetensors"
            self.save_weights(path)
            self.checkpoints[self.done] = path

    def _save_state(self) -> None:
        if self.folder is None:
            return
        state = self.optimizer.state_dict()["state"]
        moments = {f"{n} {key}": x for n, of_parameter in state.items() for key, x in of_parameter.items()}
        groups = {WEIGHTS: self.model.state_dict(), "optimizer": moments, "random": {"cpu": torch.get_rng_state()}}
        if self.device.type != "cpu":
            groups["random"]["device"] = torch.get_device_module(self.device).get_rng_state(self.device)
        kept = {str(step): path.name for step, path in self.checkpoints.items()}
        notes = {**self.settings(self.done), "done": self.done, "rows": self.rows, "kept": kept}
        write(self.folder / STATE, groups, notes)
        self._saved = time.perf_counter()

    def _load_state(self, resume: bool) -> None:
        if self.folder is None or not (path := self.folder / STATE).exists():
            return
        if not resume:
            raise ArgumentError(
                "folder", f"already holds a training run, {path}: pass resume=True or choose an empty folder"
            )
        groups, notes = read(path)
        state: dict[int, dict[str, Tensor]] = defaultdict(dict)
        try:
            done, rows, random = int(notes["done"]), list(notes["rows"]), groups["random"]
            own = random["cpu"]
            # Only names are read: whatever paths the file gives, checkpoints are those in this folder.
            kept = {int(step): self.folder / Path(name).name for step, name in notes["kept"].items()}
            for name, x in groups["optimizer"].items():
                number, key = name.split()
                state[int(number)][key] = x
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(
                "folder", f"must hold a whole training run, but {path} is damaged: {error!r}"
            ) from error
        for part, here in self.settings(done).items():
            there = notes[part] if isinstance(notes.get(part), dict) else {}
            for name in {**here, **there}:
                if here.get(name) != there.get(name):
                    raise ArgumentError(
                        "folder",
                        f"must hold this training run to be resumed, but {path} has {part} "
                        f"{name}={there.get(name)!r}, not {here.get(name)!r}: resume with its settings, or choose "
                        "another folder",
                    )
        put(self.model, groups.get(WEIGHTS, {}), path)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": dict(state)})
        torch.set_rng_state(own)
        if self.device.type != "cpu" and "device" in random:
            torch.get_device_module(self.device).set_rng_state(random["device"], self.device)
        self.done, self.rows, self.checkpoints = done, rows, kept
        self._seconds_before = rows[-1]["seconds"] if rows else 0.0
